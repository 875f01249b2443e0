"""The command as its user sees it: results, the JSON contract, one-line errors, help."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command import QUICK, covnorm, npz

import torch_covnorm as cn
from torch_covnorm.cli.app import app
from torch_covnorm.cli.options import domain_names

COMMANDS = [
    *("init", "add", "join", "import", "list", "show", "history", "rollback", "predict", "eval"),
    *("remove", "gc", "verify", "export", "report", "bench", "demo"),
]


@pytest.fixture
def house(built, tmp_path, monkeypatch):
    """A copy of the built ecology that a test may change, as the working directory."""
    shutil.copytree(built[0], tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy" / "house")
    return tmp_path / "copy"


def fails(*args, says):
    ran = covnorm(*args)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("covnorm: ")
    assert "Traceback" not in ran.err
    assert says in ran.err, ran.err
    return ran


# ── the JSON contract ────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_add_prints_the_contract(built):
    result = built[1]
    assert result["domain"] == "clipart"
    assert result["method"] == "covnorm"
    assert set(result["accuracy"]) == {"before", "adapted", "compressed", "final"}
    assert all(0 <= a <= 100 for a in result["accuracy"].values())
    assert set(result["parameters"]) == {"adapter", "total", "backbone"}
    assert result["parameters"]["backbone"] == 4652008
    assert 0 < result["parameters"]["adapter"] < result["parameters"]["total"]
    assert {"train", "collect", "normalize", "tune"} <= set(result["seconds"])
    kx, ky = result["ranks"]["blocks.6.0.conv_pwl"]
    assert 1 <= ky <= 320
    assert 1 <= kx <= 320
    assert result["bytes"] > 1000


def test_list_prints_the_contract(house):
    result = covnorm("list", "--json").json
    assert [row["domain"] for row in result] == ["clipart", "digits"]
    for row in result:
        keys = {"domain", "method", "classes", "accuracy", "parameters", "bytes"}
        assert keys <= set(row)
    assert result[1]["classes"] == 10
    assert result[1]["parameters"] <= 0.005 * 4652008


def test_predict_prints_the_contract(house):
    images = sorted((house / "photos").rglob("*.png"))[:3]
    result = covnorm("predict", "clipart", *images, "--json", "--top", 3).json
    assert [row["file"] for row in result] == [str(i) for i in images]
    for row in result:
        assert row["label"] == row["top"][0]["label"]
        assert row["probability"] == row["top"][0]["probability"]
        chances = [t["probability"] for t in row["top"]]
        assert len(chances) == 3
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) <= 1 + 1e-6


def test_eval_prints_the_contract_and_measures_what_add_measured(house):
    result = covnorm("eval", "digits", "--json").json
    assert {"domain", "accuracy", "n"} <= set(result)
    assert result["n"] == 30
    listed = covnorm("list", "--json").json[1]
    assert result["accuracy"] == pytest.approx(listed["accuracy"])


def test_eval_on_other_images_takes_all_of_them(house):
    result = covnorm("eval", "clipart", house / "photos", "--json").json
    assert result["n"] == 60
    npz(house / "wrong.npz")
    fails("eval", "clipart", house / "wrong.npz", "-q", says="domain 'clipart' has no class")


def test_verify_prints_the_contract(house):
    assert covnorm("verify", "--json").json == {"ok": True, "problems": []}
    blob = max((house / "house" / "blobs").iterdir(), key=lambda f: f.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    ran = covnorm("verify", "--json")
    assert ran.code == 2
    assert ran.json["ok"] is False
    assert blob.name in ran.json["problems"][0]


def test_show_prints_ranks_spectra_sizes_and_history(house):
    result = covnorm("show", "clipart", "--json").json
    site = "blocks.6.0.conv_pwl"
    assert len(result["results"]["spectra"][site]["x"]) == 320
    assert result["results"]["denominators"]["ra"] == 311296
    assert [e["what"] for e in result["history"]] == ["add"]
    shown = covnorm("show", "clipart").out
    assert "η = k_y/k_x" in shown
    assert "of the backbone" in shown


def test_sizes_on_disk_are_those_that_are_reported(house):
    for row in covnorm("list", "--json").json:
        facts = covnorm("show", row["domain"], "--json").json["results"]
        entry = cn.Ecology(house / "house").entry(row["domain"])
        size = sum(
            (house / "house" / "blobs" / entry.blobs[part]).stat().st_size
            for part in ("record", "tensors")
        )
        assert row["bytes"] == size == facts["bytes"]


# ── working with domains ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_join_shares_a_basis_and_later_commands_know_it(house):
    ran = covnorm("join", "--variance", 0.8, "--epochs", 1, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["shared"] > 0
    rows = covnorm("list", "--json").json
    assert {row["basis"] for row in rows} == {"joint"}
    assert {row["method"] for row in rows} == {"covnorm-joint"}
    assert {row["versions"] for row in rows} == {1}
    assert covnorm("verify").code == 0
    assert covnorm("eval", "digits", "--json").json["accuracy"] == pytest.approx(
        rows[1]["accuracy"]
    )
    history = covnorm("show", "digits", "--json").json["history"]
    assert [e["what"] for e in history] == ["add", "join"]
    assert covnorm("add", "more", house / "digits.npz", *QUICK, "--budget", 0.005).code == 0
    later = covnorm("join", "more", "--epochs", 1, "--set", "grow=0.01")
    assert "shared by 3 domains" in later.out, later.err


def test_a_single_domain_cannot_join(house):
    covnorm("remove", "digits")
    fails("join", says="two domains")


def test_remove_deletes_one_domain_and_leaves_the_other(house):
    before = {f.name: f.read_bytes() for f in (house / "house" / "blobs").iterdir()}
    kept = set(cn.Ecology(house / "house").entry("digits").blobs.values())
    assert covnorm("remove", "clipart", "--purge").code == 0
    after = {f.name: f.read_bytes() for f in (house / "house" / "blobs").iterdir()}
    assert after == {name: before[name] for name in kept}
    fails("show", "clipart", says="unknown domain 'clipart'")
    fails("remove", "clipart", says="unknown domain")


def test_report_and_exports_are_written(house):
    assert covnorm("report", "--out", house / "r.html", "--json").json["file"].endswith("r.html")
    assert "clipart" in (house / "r.html").read_text()
    ran = covnorm("export", "digits", "--to", "state-dict", "--out", house / "out", "--json")
    assert ran.code == 0, ran.err
    assert all(Path(f).exists() for f in ran.json["files"])
    assert ran.json["difference"] < 1e-3
    fails("export", "digits", "--to", "onx", says="did you mean 'onnx'")


def test_bench_reports_ratios(house):
    result = covnorm("bench", "--batch", 4, "--rounds", 1, "--json").json
    assert result["ratio_to_bare"]["bare"] == 1
    assert result["domains"] == 2
    assert set(result["images_per_second"]) >= {"bare", "one domain", "merged"}


def test_add_again_needs_replace_and_then_keeps_the_history(house):
    fails("add", "digits", house / "digits.npz", *QUICK, says="already exists")
    ran = covnorm("add", "digits", house / "digits.npz", *QUICK, "--method", "bn", "--replace")
    assert ran.code == 0, ran.err
    result = covnorm("show", "digits", "--json").json
    assert result["method"] == "bn"
    assert [e["method"] for e in result["history"]] == ["covnorm", "bn"]


# ── errors and help ──────────────────────────────────────────────────────────────────────────


def test_errors_are_one_line_with_the_remedy(house):
    digits = house / "digits.npz"
    fails("lst", says="'list'")
    fails("show", "digit", says="did you mean 'digits'?")
    fails("add", "X", digits, says="domain name 'X'")
    fails("add", "x", house / "nowhere", says="nowhere")
    fails("add", "x", digits, "--method", "covnrm", *QUICK, says="did you mean 'covnorm'?")
    fails("add", "x", digits, "--variance", 0.9, "--budget", 0.1, *QUICK, says="give one of them")
    fails("add", "x", digits, "--budget", 2, *QUICK, says="between 0 and 1")
    fails("add", "x", digits, "--set", "epoch=1", *QUICK, says="did you mean 'epochs'?")
    fails("add", "x", digits, "--dtype", "int4", *QUICK, says="float32, float16, int8")
    fails("add", "x", digits, "--device", "tpu9", *QUICK, says="Choose cpu")
    fails("add", "x", digits, "--method", "covnorm-joint", *QUICK, says="covnorm join")
    fails("predict", "digits", house / "digits.npz", says="digits.npz")
    fails("init", house / "house", says="is an ecology already")
    fails("init", house / "new", "--backbone", "vgg16", says="--weights")
    assert not (house / "new").exists()


def test_a_failed_add_leaves_the_store_as_it_was(house):
    manifest = (house / "house" / "ecology.json").read_bytes()
    fails("add", "x", house / "digits.npz", "--set", "lr=-1", *QUICK, says="lr > 0")
    assert (house / "house" / "ecology.json").read_bytes() == manifest
    assert covnorm("verify").code == 0


def test_the_ecology_is_found_by_option_variable_or_nearest_above(house, monkeypatch, tmp_path):
    deep = house / "house" / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert len(covnorm("list", "--json").json) == 2
    monkeypatch.chdir(tmp_path)
    fails("list", says="covnorm init FOLDER")
    monkeypatch.setenv("COVNORM_ECOLOGY", str(house / "house"))
    assert len(covnorm("list", "--json").json) == 2
    fails("list", "--ecology", tmp_path, says="no ecology found")
    assert domain_names("d") == ["digits"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command):
    ran = covnorm(command, "--help")
    assert ran.code == 0
    assert "Usage: covnorm " + command in ran.out
    assert "--json" in ran.out
    if command != "demo":
        assert ran.out.count(f"covnorm {command}") >= 2  # the usage and an example


@pytest.mark.parametrize("command", ["add", "join", "serve"])
def test_help_groups_every_option_in_a_panel(command):
    parameters = typer.main.get_command(app).commands[command].params
    options = [p for p in parameters if p.param_type_name == "option"]
    assert len(options) > 10
    assert [p.name for p in options if not p.rich_help_panel] == []
    shown = covnorm(command, "--help").out
    assert all(f"─ {p.rich_help_panel} ─" in shown for p in options)


def test_no_colour_without_a_terminal_and_no_messages_when_quiet(built, house):
    assert "\x1b[" not in built[2].out + built[2].err
    ran = covnorm("list", "--quiet")
    assert ran.err == ""
    assert "2 domains" in ran.out
    verified = covnorm("verify", "--quiet", "--json")
    assert verified.err == ""


def test_json_is_all_that_stdout_has(built):
    place = built[0]
    for args in (("list",), ("show", "digits"), ("verify",)):
        ran = covnorm(*args, "--ecology", place / "house", "--json")
        json.loads(ran.out)


@pytest.mark.slow
def test_an_interrupted_add_says_how_to_resume_and_refuses_other_settings(house, tmp_path):
    args = ["add", "more", str(house / "digits.npz"), "--size", "32", "--budget", "0.005"]
    args += ["--epochs", "40", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "torch_covnorm", *args],
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore SIGINT, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        result = next(line for line in process.stderr if line.startswith("train"))
        assert "frozen" in result
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert rest.splitlines()[-1].startswith("covnorm: interrupted: run the same command again")
    assert "Traceback" not in rest
    assert "more" not in [row["domain"] for row in covnorm("list", "--json").json]
    fails("add", "more", house / "digits.npz", *QUICK, says="--fresh")  # one epoch, not 40
    assert covnorm("add", "more", house / "digits.npz", *QUICK, "--fresh").code == 0
    assert not any(f.is_dir() for f in (house / "house" / "work" / "domains").iterdir())


@pytest.mark.slow
def test_a_real_process_prints_the_same(house):
    run = [sys.executable, "-m", "torch_covnorm"]
    done = subprocess.run([*run, "list", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == covnorm("list", "--json").json
    wrong = subprocess.run([*run, "show", "nobody"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert re.fullmatch(r"covnorm: .*unknown domain 'nobody'.*\n", wrong.stderr)
