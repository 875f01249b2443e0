"""What goes wrong in practice: changed images, wrong settings, damaged files."""

from __future__ import annotations

import pytest
import small_ecology as small
from command import QUICK, covnorm, npz

from torch_covnorm.ecology import Ecology


@pytest.fixture
def house(built, monkeypatch):
    """The folder of the built ecology and its images; tests leave them as they were."""
    monkeypatch.setenv("COVNORM_ECOLOGY", str(built[0] / "house"))
    return built[0]


def says(words, *args):
    ran = covnorm(*args)
    assert ran.code == 2, ran
    assert ran.err.count("\n") == 1, ran.err
    assert words in ran.err, ran.err


@pytest.mark.slow
def test_images_that_have_changed_are_refused_not_used_with_wrong_labels(house):
    folder = house / "photos"
    first = sorted(p for p in folder.iterdir())[0]
    first.rename(folder / "zoo")  # every label moves by one
    try:
        says("have changed since domain 'clipart' was made", "join", "--quiet")
        says("have changed since", "eval", "clipart", "--quiet")
        says("domain 'clipart' has no class 'zoo'", "eval", "clipart", folder, "--quiet")
    finally:
        (folder / "zoo").rename(first)
    assert covnorm("eval", "clipart").code == 0
    (first / "0.png").write_bytes(next(first.glob("*.png")).read_bytes())
    try:
        says("have changed since", "eval", "clipart", "--quiet")
    finally:
        (first / "0.png").unlink()


def test_tables_are_not_cut_in_a_pipe(house):
    shown = covnorm("show", "digits").out
    assert "…" not in shown
    assert "network: 4,652,008" in shown
    assert "311,296" in shown


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("seed=3", "--seed"),
        ("variance=abc", "give a number"),
        ("rank=x", "method 'covnorm' has no setting rank="),
        ("epochs=abc", "must be an integer"),
        ("epochs=1.5", "must be an integer"),
        ("weight_decay=x", "must be a number"),
        ("betas=3", "must be a list of numbers"),
        ("ranks=5", "give {site: (kx, ky)}"),
        ("adapter=batchnorm", "adapter='batchnorm'"),
        ("nothing", "KEY=VALUE"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(house, setting, words):
    says(words, "add", "x", house / "digits.npz", "--set", setting, "--size", 32, "-q")


def test_what_this_network_cannot_do_is_refused_before_it_trains(house, tmp_path):
    says("one direction at each", "add", "x", house / "digits.npz", "--budget", 1e-5, *QUICK)
    npz(tmp_path / "one.npz", 10, 10)  # one image per class: no validation split
    says("--max-drop", "add", "x", tmp_path / "one.npz", "--max-drop", 1, *QUICK)
    assert not (house / "house" / "work" / "domains" / "x" / "trained").exists()


def test_verify_prints_json_for_a_damaged_manifest(tmp_path, monkeypatch):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    ecology.file.write_text("{}")
    monkeypatch.setenv("COVNORM_ECOLOGY", str(tmp_path / "e"))
    ran = covnorm("verify", "--json", "-q")
    assert ran.code == 2
    assert ran.json["ok"] is False


def test_usage_errors_name_the_command_and_exports_know_their_ending(house, tmp_path):
    says("(see covnorm join --help)", "join", "--nothing")
    ran = covnorm("export", "digits", "--out", tmp_path / "d.safetensors", "--json")
    assert ran.json["to"] == "state-dict"
