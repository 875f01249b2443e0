"""What goes wrong in practice: changed images, wrong settings, domains that join one by one."""

from __future__ import annotations

import os

import pytest
import small_ecology as small
import torch
from command import QUICK, covnorm, npz, photos

import torch_covnorm as cn
from torch_covnorm.data import read_source
from torch_covnorm.ecology import Ecology, verify
from torch_covnorm.ecology import add as adding
from torch_covnorm.ecology.config import add_config
from torch_covnorm.ecology.join import METHOD, join
from torch_covnorm.training import probe as bare


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


def test_a_class_whose_name_is_not_text_is_refused(tmp_path):
    photos(tmp_path / "photos")
    odd = os.fsdecode(os.fsencode(tmp_path / "photos") + b"/caf\xe9")
    next((tmp_path / "photos").iterdir()).rename(odd)
    with pytest.raises(cn.CovNormError, match=r"is not valid text\. Rename it"):
        read_source(tmp_path / "photos")


def test_the_a_of_residual_adapters_survives_a_join(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    for name in ("digits", "parity"):
        small.added(ecology, name, "ra")
    before = {n: small.answers(ecology, n) for n in ("digits", "parity")}
    small.joined(ecology, "digits", "parity")
    for name, answers in before.items():
        assert small.answers(ecology, name) != answers
        assert small.answers(ecology, name, trained=True) == answers
    small.joined(ecology, "digits", "parity", basis="other")
    assert list(ecology.bases) == ["other"]
    assert verify(ecology.folder) == []


def test_one_more_joins_without_the_images_of_the_others(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    for name in ("digits", "parity", "more"):
        small.added(ecology, name)
    small.joined(ecology, "digits", "parity", variance=1.0)  # holds all: nothing makes it grow
    before = {n: ecology.entry(n) for n in ("digits", "parity")}
    asked = []

    def data(name):
        asked.append(name)
        return small.decoded(parity=name == "parity")

    config = small.config(METHOD, variance=1.0)
    done = join(ecology, ["more"], data, config, backbone=small.backbone())
    assert asked == ["more"]
    assert list(done) == ["more"]
    assert {n: ecology.entry(n) for n in before} == before
    assert {e.basis for e in ecology.domains.values()} == {"joint"}
    assert verify(ecology.folder) == []
    small.joined(ecology, variance=1.0)  # no new domain: all are tuned again
    with pytest.raises(cn.CovNormError, match="unknown domain"):
        join(ecology, ["nobody"], data, config, backbone=small.backbone())


def test_joining_all_leaves_domains_of_other_bases_there(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    for name in ("digits", "parity", "a", "b"):
        small.added(ecology, name)
    small.joined(ecology, "a", "b", basis="first")
    small.joined(ecology)
    assert {n: e.basis for n, e in ecology.domains.items()} == {
        "digits": "joint",
        "parity": "joint",
        "a": "first",
        "b": "first",
    }


def test_a_preset_decides_how_a_is_trained(tmp_path, monkeypatch):
    right, seen = adding.adapt, []

    def adapt(net, name, *args, **kwargs):
        seen.append((name, kwargs["method"].training))
        return right(net, name, *args, **kwargs)

    monkeypatch.setattr(adding, "adapt", adapt)
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    config = add_config("covnorm", {"preset": "paper", "epochs": 2}, batch=20)
    adding.add(ecology, "digits", small.decoded(), config, backbone=small.backbone())
    assert seen[0][0] == "trained"
    assert (seen[0][1].optimizer, seen[0][1].epochs) == ("adam", 2)


@pytest.mark.parametrize("method", ["piggyback", "lwf", "covnorm"])
def test_the_history_counts_as_the_list_does_and_forgetting_is_kept(tmp_path, method):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    facts = small.added(ecology, "digits", method)
    assert facts["history"][-1]["parameters"] == ecology.entry("digits").parameters > 0
    assert (facts["results"]["forgetting"] is not None) == (method == "lwf")


def test_an_uncompressed_adapter_is_reported(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    config = add_config("covnorm", {"max_drop": 0.0, "epochs": 8, "lr": 0.02}, batch=20)
    adding.add(ecology, "digits", small.decoded(), config, backbone=small.backbone())
    details = ecology.details("digits")["results"]
    assert details["whole"] == (ecology.entry("digits").parameters >= details["denominators"]["ra"])


def test_verify_ignores_what_others_remove_meanwhile(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    small.put(ecology, "a", "b", "c")

    def remove(done, total):
        if done == 1:
            Ecology(ecology.folder).remove(["b"])

    assert verify(ecology.folder, progress=remove) == []
    ecology.blobs.path(ecology.entry("c").blobs["tensors"]).unlink()
    assert len(verify(ecology.folder)) == 1


def test_ridge_regression_is_its_normal_equations(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(300, 6), torch.randint(0, 4, (300,))
    x[torch.arange(300), y] += 2
    x = x - x.mean(0)
    head = bare._ridge(x, y, 4, 0.1)
    Y = torch.eye(4)[y]
    Y, mean = Y - Y.mean(0), Y.mean(0)
    expected = torch.linalg.solve(x.T @ x / 300 + 0.1 * torch.eye(6), x.T @ Y / 300)
    torch.testing.assert_close(head, torch.cat([expected, mean[None]]), atol=1e-4, rtol=1e-3)
    assert (bare._logits(x, head).argmax(1) == y).float().mean() > 0.7
    monkeypatch.setattr(bare, "LOGISTIC_CLASSES", 5)
    net = cn.MultiDomainNetwork(small.backbone())
    images = small.decoded().splits["train"]
    data = [(images.x.float() / 255, images.y)]
    assert bare.linear_accuracy(net, 10, data, None, data) > 20
