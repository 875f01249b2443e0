"""The store while others write to it, and with ten thousand domains in it."""

from __future__ import annotations

import json
import threading

import pytest
import small_ecology as small
from typer.testing import CliRunner

import torch_covnorm as cn
from torch_covnorm.ecology import Details, Ecology, verify
from torch_covnorm.ecology.blobs import Blobs
from torch_covnorm.ecology.manifest import MANIFEST


@pytest.fixture
def ecology(tmp_path):
    return Ecology.create(tmp_path / "house", small.backbone())


# ── at once ───────────────────────────────────────────────────────────────────────────────────


def test_one_that_is_open_sees_what_another_writes(ecology):
    other = Ecology(ecology.folder)
    for i in range(20):
        small.put(other, "flowers", seed=i, replace=True)
        assert ecology.entry("flowers") == other.entry("flowers")
    other.remove(["flowers"])
    assert ecology.domains == {}


def test_threads_that_write_at_once_lose_no_update(ecology):
    names = [f"d{i}" for i in range(12)]
    nets = {name: small.network(name) for name in names}
    problems = []

    def write(mine):
        try:
            for name in mine:
                ecology.put(nets[name], {name: Details(small.facts())})
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(names[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert sorted(ecology.domains) == sorted(names)
    assert verify(ecology.folder) == []


def during_one_read(monkeypatch, before, after=lambda: None):
    """Call `before` and `after` around one read of tensors, like another process that writes."""
    original = Blobs.read_tensors

    def read(blobs, blob):
        monkeypatch.setattr(Blobs, "read_tensors", original)
        before()
        try:
            return original(blobs, blob)
        finally:
            after()

    monkeypatch.setattr(Blobs, "read_tensors", read)


def test_a_domain_that_is_replaced_while_it_is_read_loads_as_the_new_one(ecology, monkeypatch):
    ecology.set_keep(0)  # so that its blobs are deleted while they are read
    small.put(ecology, "flowers")
    old = small.answers(ecology, "flowers")
    writer = Ecology(ecology.folder)
    during_one_read(monkeypatch, lambda: small.put(writer, "flowers", seed=1, replace=True))
    found = small.answers(ecology, "flowers")
    assert found != old
    assert found == small.answers(ecology, "flowers")


def test_a_domain_that_is_replaced_and_put_back_while_it_is_read_loads(ecology, monkeypatch):
    small.put(ecology, "flowers")
    old = small.answers(ecology, "flowers")
    writer = Ecology(ecology.folder)
    during_one_read(
        monkeypatch,
        lambda: small.put(writer, "flowers", seed=1, replace=True),
        lambda: small.put(writer, "flowers", seed=0, replace=True),
    )
    assert small.answers(ecology, "flowers") == old


def test_a_domain_that_is_removed_while_it_is_read_is_unknown(ecology, monkeypatch):
    ecology.set_keep(0)  # so that its blobs are deleted while they are read
    small.put(ecology, "flowers")
    writer = Ecology(ecology.folder)
    during_one_read(monkeypatch, lambda: writer.remove(["flowers"]))
    with pytest.raises(cn.CovNormError, match="unknown domain"):
        small.answers(ecology, "flowers")


@pytest.mark.parametrize("change", ["replaced", "removed", "rolled back"])
def test_a_domain_whose_version_is_kept_while_it_is_read_loads_as_it_was(
    ecology, monkeypatch, change
):
    """Its blobs stay, so the reader sees the store before the change and need not read again."""
    small.put(ecology, "flowers", seed=1)
    small.put(ecology, "flowers", replace=True)
    old = small.answers(ecology, "flowers")
    writer = Ecology(ecology.folder)
    changes = {
        "replaced": lambda: small.put(writer, "flowers", seed=2, replace=True),
        "removed": lambda: writer.remove(["flowers"]),
        "rolled back": lambda: writer.rollback(["flowers"]),
    }
    during_one_read(monkeypatch, changes[change])
    assert small.answers(ecology, "flowers") == old
    assert "flowers" not in ecology.domains or small.answers(ecology, "flowers") != old


# ── many ──────────────────────────────────────────────────────────────────────────────────────

MANY = 10_000


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Ten thousand domains; all but the first share their tensors, to save disk space."""
    ecology = Ecology.create(tmp_path_factory.mktemp("many") / "house", small.backbone())
    small.put(ecology, "first", "d0")

    def multiply(manifest):
        entry = manifest["domains"].pop("d0")
        manifest["domains"] |= {f"d{i:05}": entry for i in range(MANY - 1)}

    small.forge(ecology.folder, multiply)
    return ecology.folder


def test_opening_and_listing_ten_thousand_domains_reads_one_file(many):
    with small.opened() as seen:
        ecology = Ecology(many)
        assert len(ecology.domains) == MANY
        assert ecology.entry("d00017").classes == 3
        assert ecology.bases == {}
        assert ecology.domains.keys() >= {"first", "d09998"}
    assert seen == [str(many / MANIFEST)]


def test_loading_one_of_ten_thousand_domains_reads_its_own_two_files(many):
    ecology = Ecology(many)
    net = ecology.network(small.backbone())
    with small.opened() as seen:
        ecology.load(net, "first")
    blobs = ecology.entry("first").blobs
    assert seen == [str(many / "blobs" / blobs[part]) for part in ("record", "tensors")]
    assert list(net.domains) == ["first"]


def test_a_manifest_that_was_replaced_is_read_once_more_and_no_blob(many):
    ecology = Ecology(many)
    small.forge(many, dict.copy)
    with small.opened() as seen:
        for _ in range(3):
            assert len(ecology.domains) == MANY
    assert seen == [str(many / MANIFEST)]


def test_one_more_beside_ten_thousand_reads_none_of_their_blobs_and_keeps_them(many):
    ecology = Ecology(many)
    before = ecology.domains
    others = {str(many / "blobs" / b) for e in before.values() for b in e.blobs.values()}
    net = small.network("more")
    with small.opened() as seen:
        ecology.put(net, {"more": Details(small.facts(99.0))})
    assert not others & set(seen)
    after = ecology.domains
    assert after.pop("more")
    assert after == before
    ecology.remove(["more"])
    assert ecology.domains == before
    small.assert_tidy(many)


def test_the_command_lists_ten_thousand_domains(many):
    from torch_covnorm.cli.app import app

    with small.opened() as seen:
        done = CliRunner().invoke(app, ["list", "--json", "--ecology", str(many)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == MANY
    assert rows[1]["domain"] == "d00000"
    assert {"domain", "method", "classes", "accuracy", "parameters", "bytes"} <= set(rows[0])
    assert [f for f in seen if str(many) in f] == [str(many / MANIFEST)]
