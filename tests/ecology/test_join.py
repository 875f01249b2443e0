"""`join` through the library, on real digits."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import small_ecology as small
import torch
from zoo import shake_

import torch_covnorm as cn
from torch_covnorm.ecology import Details, Ecology, verify
from torch_covnorm.ecology.add import add
from torch_covnorm.ecology.blobs import Blobs
from torch_covnorm.ecology.join import METHOD, join
from torch_covnorm.ecology.prediction import probabilities
from torch_covnorm.training.progress import Reporter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ecology(tmp_path):
    return Ecology.create(tmp_path / "house", small.backbone())


def images(name):
    return small.decoded(parity=name == "parity")


# ── join ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.set_num_threads(1)
    return small.everything(tmp_path_factory.mktemp("made") / "house")


@pytest.fixture
def house(made, tmp_path):
    return Ecology(shutil.copytree(made.folder, tmp_path / "house"))


def test_joined_domains_share_a_basis_and_loading_one_brings_it(house):
    assert verify(house.folder) == []
    small.assert_tidy(house.folder)
    assert {n: e.basis for n, e in house.domains.items()} == {
        "digits": "joint",
        "parity": "joint",
        "alone": None,
        "norms": None,
    }
    net = house.network(small.backbone())
    with small.opened() as seen:
        house.load(net, "digits")
    assert list(net.bases) == ["joint"]
    blobs, shared = house.entry("digits").blobs, house.bases["joint"]
    needed = {blobs["record"], blobs["tensors"], shared["record"], shared["tensors"]}
    read = {Path(file).name for file in seen if "/blobs/" in file}
    assert needed <= read <= needed | {shared["moments"]}
    with small.opened() as seen:
        house.load(net, "parity")
    assert len([f for f in seen if "/blobs/" in f]) == 2, "the basis is read once"
    factors = net.basis("joint").factors["3"]
    for name in ("digits", "parity"):
        shared = net.domain(name).adapters["3"].A
        assert any(part is factors for part in shared.__dict__.values()) or any(
            torch.equal(t, factors.W) for t in shared.factors
        )


def test_the_accuracy_of_a_joined_domain_is_that_of_the_loaded_one(house):
    for name in ("digits", "parity"):
        net = house.network(small.backbone())
        house.load(net, name)
        held = images(name).splits["test"]
        right = (probabilities(net, name, held.x).argmax(1) == held.y).float().mean()
        assert house.entry(name).accuracy == pytest.approx(100 * float(right), abs=1e-4)


def test_joining_again_gives_the_same_tensors(house, tmp_path):
    again = Ecology.create(tmp_path / "again", small.backbone())
    for name in ("digits", "parity"):
        small.added(again, name)
    small.joined(again, "digits", "parity")
    for name in ("digits", "parity"):
        assert again.entry(name).blobs["tensors"] == house.entry(name).blobs["tensors"]
    assert again.bases["joint"]["tensors"] == house.bases["joint"]["tensors"]


def test_joined_domains_keep_their_trained_parts_and_history(house):
    history = house.details("digits")["history"]
    assert [e["what"] for e in history] == ["add", "join"]
    assert small.answers(house, "digits", trained=True) != small.answers(house, "digits")
    assert house.moments("digits")


def test_a_further_domain_joins_and_the_others_that_share_stay_consistent(house):
    details = small.joined(house, "alone")
    assert {e.basis for n, e in house.domains.items() if n != "norms"} == {"joint"}
    assert set(details) == {"digits", "parity", "alone"}
    assert verify(house.folder) == []
    small.assert_tidy(house.folder)
    for name in house.domains:
        small.answers(house, name)


def test_a_basis_is_not_changed_under_domains_that_are_left_out(house):
    net = house.network(small.backbone())
    house.load(net, "digits")
    with torch.no_grad():
        net.basis("joint").factors["3"].W.mul_(1.1)
    before = small.files(house.folder)
    with pytest.raises(cn.CovNormError, match=r"'joint' is shared by parity"):
        house.put(net, {"digits": Details(small.facts())}, replace=True)
    assert small.files(house.folder) == before


@pytest.mark.parametrize("reading", ["of the basis", "of the domain"])
def test_a_basis_that_is_replaced_while_a_domain_is_read_loads_as_the_new_one(
    house, monkeypatch, reading
):
    house.set_keep(0)  # so that its blobs are deleted while they are read
    writer, right = Ecology(house.folder), Blobs.read_tensors
    old, done = small.answers(house, "digits"), []
    domain, basis = house.entry("digits").blobs, house.bases["joint"]
    moment = (basis if reading == "of the basis" else domain)["tensors"]

    def rejoined():
        net = writer.network(small.backbone())
        names = ("digits", "parity")
        for name in names:
            writer.load(net, name)
            shake_(net.domain(name))
        with torch.no_grad():
            net.basis("joint").factors["3"].W.mul_(1.5)
        writer.put(net, {n: Details(small.facts(), keep_rest=True) for n in names}, replace=True)

    def read(blobs, blob):
        if blob == moment and not done:
            done.append(blob)
            rejoined()
        return right(blobs, blob)

    monkeypatch.setattr(Blobs, "read_tensors", read)
    found = small.answers(house, "digits")
    assert done
    assert found != old
    assert found == small.answers(house, "digits")


def test_the_basis_goes_with_the_last_domain_that_shares_it(house):
    parity = small.read(house, "parity")
    house.remove(["digits"])
    assert list(house.bases) == ["joint"]
    assert small.read(house, "parity") == parity
    house.remove(["parity"])
    assert house.bases == {}
    small.assert_tidy(house.folder)
    assert verify(house.folder) == []


def test_a_domain_replaced_leaves_the_basis_and_the_others_stay(house):
    parity = small.read(house, "parity")
    data = small.decoded()
    add(house, "digits", data, small.config(), backbone=small.backbone(), replace=True)
    assert house.entry("digits").basis is None
    assert small.read(house, "parity") == parity
    assert verify(house.folder) == []


def test_what_cannot_join_is_refused_and_the_store_stays(house):
    before = small.files(house.folder)
    for names, words in (
        (("norms", "alone"), "no trained A"),
        (("nobody", "alone"), "unknown domain 'nobody'"),
    ):
        with pytest.raises(cn.CovNormError, match=words):
            small.joined(house, *names)
    house.remove(["digits", "parity"])
    with pytest.raises(cn.CovNormError, match="two domains"):
        small.joined(house, "alone")
    assert before != small.files(house.folder)


@pytest.mark.parametrize("basis", ["../../blobs", "../../../away", "absolute", "a/b", "", "UPPER"])
def test_a_basis_name_that_is_none_is_refused_before_any_file_is_touched(house, basis):
    away = house.folder.parent / "away"
    away.mkdir()
    (away / "mine").write_text("mine")
    if basis == "absolute":
        basis = str(away)

    def everything():
        return sorted(f for f in house.folder.parent.rglob("*"))

    def joined():
        config = small.config(METHOD, basis=basis)
        join(house, ["alone", "digits"], images, config, backbone=small.backbone(), fresh=True)

    before = everything()
    with pytest.raises(cn.CovNormError, match="name"):
        joined()
    assert everything() == before


def test_domains_of_training_images_alone_can_join(ecology):
    """`add` takes them, so `join` must say before the training what is wrong with them."""
    for name in ("digits", "parity"):
        data = small.decoded("train", parity=name == "parity")
        add(ecology, name, data, small.config(), backbone=small.backbone())
    join(
        ecology,
        [],
        lambda name: small.decoded("train", parity=name == "parity"),
        small.config(METHOD),
        backbone=small.backbone(),
    )
    assert verify(ecology.folder) == []


def interrupted_join(ecology, stop="tune"):
    reporter = small.Steps(stop).reporting()
    with pytest.raises(KeyboardInterrupt):
        join(
            ecology,
            ["digits", "parity"],
            images,
            small.config(METHOD),
            backbone=small.backbone(),
            reporter=reporter,
        )


@pytest.fixture
def two(ecology):
    for name in ("digits", "parity"):
        small.added(ecology, name)
    return ecology


def test_an_interrupted_join_goes_on_to_the_same_tensors(two, made):
    before = small.files(two.folder)
    interrupted_join(two)
    assert small.files(two.folder) == before
    steps = small.Steps()
    reporter = steps.reporting()
    config = small.config(METHOD)
    join(two, ["digits", "parity"], images, config, backbone=small.backbone(), reporter=reporter)
    for name in ("digits", "parity"):
        assert two.entry(name).blobs["tensors"] == made.entry(name).blobs["tensors"]


def test_an_interrupted_join_does_not_go_on_with_an_a_that_was_trained_anew(two):
    """The moments of the old A's in the workplace are not those of the new ones."""
    interrupted_join(two)
    changes = {"backbone": small.backbone(), "replace": True}
    add(two, "digits", small.decoded(), small.config(seed=1), **changes)
    try:
        small.joined(two, "digits", "parity")
    except cn.CovNormError as error:  # refused: as good as begun anew
        words = str(error)
        assert "fresh" in words
        return
    found = two.entry("digits").blobs["tensors"], two.bases["joint"]["tensors"]
    two.remove(["parity", "digits"])
    small.added(two, "digits", seed=1)
    small.added(two, "parity")
    small.joined(two, "digits", "parity")
    assert found == (two.entry("digits").blobs["tensors"], two.bases["joint"]["tensors"])


@pytest.mark.parametrize("change", ["replaced", "removed"])
@pytest.mark.parametrize("moment", ["decode", "measure parity"])
@pytest.mark.slow
def test_a_join_does_not_undo_what_another_did_to_its_domains_meanwhile(two, change, moment):
    other, done = Ecology(two.folder), []

    def meanwhile(stage, what):
        if not done and f"{stage} {what}".startswith(moment):
            done.append(stage)
            if change == "removed":
                other.remove(["digits"])
            else:
                arguments = {"backbone": small.backbone(), "replace": True}
                add(other, "digits", small.decoded(), small.config(seed=1), **arguments)

    with contextlib.suppress(cn.CovNormError):  # to refuse is right, and so is to begin anew
        names, config = ["digits", "parity"], small.config(METHOD)
        reporter = Reporter(stage=meanwhile)
        join(two, names, images, config, backbone=small.backbone(), reporter=reporter)
    assert done
    assert verify(two.folder) == []
    if change == "removed":
        assert "digits" not in two.domains, "a removed domain has come back"
        return
    history = [event["what"] for event in two.details("digits")["history"]]
    assert history[:2] == ["add", "add"], "a newer domain is lost"
    if two.entry("digits").basis is not None:
        found = two.entry("digits").blobs["tensors"]
        small.joined(two, "digits", "parity", basis="another")
        assert found == two.entry("digits").blobs["tensors"], "an M that fits the older A"


def test_a_domain_that_comes_back_does_not_undo_who_joined_since(house):
    """The same factors with fewer statistics behind them: further joins need those of all."""

    def behind():
        net = house.network(small.backbone())
        house.load_basis(net, "joint")
        return net.basis("joint").seen

    old = house.network(small.backbone())
    house.load(old, "digits")
    before = behind()
    small.joined(house, "alone", grow=0.01)
    more, factors = behind(), house.bases["joint"]["tensors"]
    assert more > before
    house.put(old, {"digits": Details(small.facts())}, replace=True)
    assert (behind(), house.bases["joint"]["tensors"]) == (more, factors)
    assert verify(house.folder) == []


# ── damage in between ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("part", ["record", "tensors", "details", "moments", "trained.tensors"])
def test_a_damaged_domain_is_healed_by_replacing_it(house, part):
    file = house.blobs.path(house.entry("alone").blobs[part])
    file.write_bytes(file.read_bytes()[:-3])
    assert any(file.name in p for p in verify(house.folder))
    arguments = {"backbone": small.backbone(), "replace": True}
    add(house, "alone", small.decoded(), small.config(), **arguments)
    assert verify(house.folder) == []


def test_a_damaged_domain_is_healed_by_removing_and_adding_it(house):
    for blob in house.entry("alone").blobs.values():
        house.blobs.path(blob).write_bytes(b"?")
    house.remove(["alone"])
    small.added(house, "alone")
    assert verify(house.folder) == []


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
