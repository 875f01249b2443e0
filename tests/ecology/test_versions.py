"""Earlier versions of domains: what is kept, and what `rollback` brings back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_ecology as small

import torch_covnorm as cn
from torch_covnorm.ecology import Details, Ecology, verify, versions
from torch_covnorm.ecology.manifest import KEEP, MANIFEST

OLD = Path(__file__).parents[1] / "fixtures" / "first-format" / "house"


@pytest.fixture
def ecology(tmp_path):
    return Ecology.create(tmp_path / "house", small.backbone())


def replaced(ecology, seeds, name="flowers"):
    """Put a domain once per seed; return its answers each time."""
    answers = []
    for seed in seeds:
        small.put(ecology, name, seed=seed, replace=True)
        answers.append(small.answers(ecology, name))
    assert len(set(answers)) == len(answers)
    return answers


# ── kept and restored ─────────────────────────────────────────────────────────────────────────


def test_a_replaced_domain_comes_back_to_the_bit_and_a_rollback_is_undone_by_another(ecology):
    small.put(ecology, "birds")
    old, new = replaced(ecology, [0, 1])
    birds, entries = small.read(ecology, "birds"), [v.entry for v in ecology.versions["flowers"]]
    everything = ecology.blobs.names()
    ecology.rollback(["flowers"])
    assert small.answers(ecology, "flowers") == old
    assert ecology.entry("flowers") == entries[0]
    assert ecology.blobs.names() == everything, "no blob is written and none is lost"
    ecology.rollback(["flowers"])
    assert small.answers(ecology, "flowers") == new
    assert small.read(ecology, "birds") == birds
    assert verify(ecology.folder) == []
    small.assert_tidy(ecology.folder)


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_no_more_versions_are_kept_than_the_ecology_says(tmp_path, keep):
    ecology = Ecology.create(tmp_path / "house", small.backbone(), keep=keep)
    assert ecology.keep == keep
    answers = replaced(ecology, range(5))
    assert len(ecology.versions.get("flowers", ())) == keep
    small.assert_tidy(ecology.folder)
    for back in range(1, keep + 1):
        ecology.rollback(["flowers"], to=back)  # what was current moves to the front
        assert small.answers(ecology, "flowers") == answers[-1 - back]
    if not keep:
        with pytest.raises(cn.CovNormError, match="'flowers' has no earlier version"):
            ecology.rollback(["flowers"])


def test_the_default_is_three_and_fewer_free_the_rest_at_once(ecology):
    assert ecology.keep == KEEP == 3
    replaced(ecology, range(5))
    before = ecology.blobs.names()
    ecology.set_keep(1)
    assert Ecology(ecology.folder).keep == 1
    assert len(ecology.versions["flowers"]) == 1
    assert len(ecology.blobs.names()) < len(before)
    small.assert_tidy(ecology.folder)
    for wrong in (-1, 1.5, True, "2", None):
        with pytest.raises(cn.CovNormError, match="keep="):
            ecology.set_keep(wrong)
        with pytest.raises(cn.CovNormError, match="keep="):
            Ecology.create(ecology.folder / "other", small.backbone(), keep=wrong)


def test_the_same_domain_again_is_not_a_new_version(ecology):
    small.put(ecology, "flowers")
    small.put(ecology, "flowers", replace=True)
    assert ecology.versions == {}
    replaced(ecology, [1, 2])
    small.put(ecology, "flowers", seed=1, replace=True)  # what version 1 is
    digests = [row["digest"] for row in ecology.history("flowers")]
    assert len(digests) == len(set(digests)) == 3


def test_a_removed_domain_comes_back_unless_it_is_purged(ecology):
    answers = replaced(ecology, [0, 1])
    small.put(ecology, "birds")
    ecology.remove(["flowers"])
    assert list(ecology.domains) == ["birds"]
    assert [row["current"] for row in ecology.history("flowers")] == [False, False]
    assert verify(ecology.folder) == []
    ecology.rollback(["flowers"])
    assert small.answers(ecology, "flowers") == answers[1]
    assert [row["current"] for row in ecology.history("flowers")] == [True, False]
    ecology.remove(["flowers"], purge=True)
    small.assert_tidy(ecology.folder)
    assert len(ecology.blobs.names()) == 3, "only those of birds"
    with pytest.raises(cn.CovNormError, match="unknown domain 'flowers'"):
        ecology.rollback(["flowers"])
    with pytest.raises(cn.CovNormError, match="unknown domain 'flowers'"):
        ecology.history("flowers")


def test_a_domain_that_was_removed_can_be_purged_later_and_no_other_name(ecology):
    small.put(ecology, "flowers", "birds")
    ecology.remove(["flowers"])
    with pytest.raises(cn.CovNormError, match="unknown domain 'flowers'"):
        ecology.remove(["flowers"])
    with pytest.raises(cn.CovNormError, match="unknown domain 'flower'"):
        ecology.remove(["flowers", "flower"], purge=True)
    assert "flowers" in ecology.versions
    ecology.remove(["flowers"], purge=True)
    assert ecology.versions == {}


def test_a_name_that_is_added_again_keeps_the_versions_of_the_removed_one(ecology):
    (old,) = replaced(ecology, [0])
    ecology.remove(["flowers"])
    small.put(ecology, "flowers", seed=1)
    ecology.rollback(["flowers"])
    assert small.answers(ecology, "flowers") == old


def test_a_failed_change_keeps_no_version(ecology):
    small.put(ecology, "flowers")
    net = small.network("flowers", seed=1)
    net.domain("flowers").adapters["3"].A.A.data[0, 0] = float("nan")
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match="NaN"):
        ecology.put(net, {"flowers": Details(small.facts())}, replace=True)
    assert small.files(ecology.folder) == before


# ── which one ─────────────────────────────────────────────────────────────────────────────────


def test_a_version_is_named_by_number_or_digest(ecology):
    answers = replaced(ecology, range(3))
    history = ecology.history("flowers")
    assert [row["version"] for row in history] == [0, 1, 2]
    digest = history[2]["digest"]
    assert ecology.rollback(["flowers"], to=digest[:8].upper()) == {"flowers": digest}
    assert small.answers(ecology, "flowers") == answers[0]
    assert ecology.history("flowers")[0]["digest"] == digest
    before = small.files(ecology.folder)
    for wrong in (0, 3, "0", "99", "", "abc", "f" * 64, digest[:8], digest + "0", "../x", "-1"):
        with pytest.raises(cn.CovNormError, match=r"'flowers', version .*covnorm history flowers"):
            ecology.rollback(["flowers"], to=wrong)
    assert small.files(ecology.folder) == before


def test_digits_are_a_number_if_they_are_few_and_a_digest_must_be_unique(ecology, monkeypatch):
    replaced(ecology, range(3))
    manifest = ecology._manifest()
    earlier = manifest.earlier["flowers"]
    digests = dict(zip(map(id, earlier), ("1234" + "a" * 60, "1234" + "b" * 60), strict=True))
    monkeypatch.setattr(versions.Version, "digest", property(lambda v: digests[id(v)]))
    assert versions.find(manifest, "flowers", "2") is earlier[1]
    assert versions.find(manifest, "flowers", "1234b") is earlier[1]
    for wrong, why in (("1234", "several"), ("123", "no such"), ("a", "no such")):
        with pytest.raises(cn.CovNormError, match=why):
            versions.find(manifest, "flowers", wrong)


def test_the_version_of_one_domain_is_not_that_of_several(ecology):
    replaced(ecology, range(2))
    replaced(ecology, range(2), "birds")
    with pytest.raises(cn.CovNormError, match="name one domain"):
        ecology.rollback(["flowers", "birds"], to=1)
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match=r"unknown domain 'flower'.*'flowers'"):
        ecology.rollback(["birds", "flower"])
    assert small.files(ecology.folder) == before, "all or nothing"


@pytest.mark.slow
def test_history_tells_what_was_done_and_when(ecology):
    small.added(ecology, "digits")
    small.added(ecology, "parity")
    small.joined(ecology, "digits", "parity")
    now, before = ecology.history("digits")
    assert (now["what"], now["method"], now["current"]) == ("join", "covnorm-joint", True)
    assert (before["what"], before["method"], before["current"]) == ("add", "covnorm", False)
    assert now["time"] >= before["time"] > "2024"
    assert now["bytes"] == ecology.entry("digits").bytes
    ecology.rollback(["digits"])
    assert ecology.entry("digits").basis is None, "as it was before it was joined"
    assert list(ecology.bases) == ["joint"], "parity still shares it"
    ecology.rollback(["digits", "parity"])
    assert ecology.entry("digits").basis == "joint"
    assert ecology.entry("parity").basis is None
    assert verify(ecology.folder) == []
    ecology.blobs.path(ecology.entry("digits").blobs["details"]).unlink()
    assert ecology.history("digits")[0]["what"] is None


@pytest.mark.parametrize("history", [None, "add", [], ["add", 7], {"what": "add"}])
def test_history_lists_a_version_whose_details_tell_nothing(ecology, history):
    net = small.network("flowers")
    ecology.put(net, {"flowers": Details(small.facts(history=history))})
    (row,) = ecology.history("flowers")
    assert (row["time"], row["what"], row["accuracy"]) == (None, None, 50.0)


# ── bases ─────────────────────────────────────────────────────────────────────────────────────


def test_a_basis_that_a_version_needs_is_kept_with_it_and_comes_back(ecology):
    small.share(ecology, "a", "b")
    old = {name: small.answers(ecology, name) for name in ("a", "b")}
    blobs = ecology.bases["joint"]
    ecology.remove(["a", "b"])
    assert ecology.bases == {}
    assert set(blobs.values()) <= ecology.blobs.names()
    assert verify(ecology.folder) == []
    ecology.rollback(["a"])
    assert ecology.bases == {"joint": blobs}
    ecology.rollback(["b"])
    assert {name: small.answers(ecology, name) for name in ("a", "b")} == old
    assert verify(ecology.folder) == []


def test_domains_whose_basis_has_changed_go_back_together_or_not_at_all(ecology):
    small.share(ecology, "a", "b")
    old = {name: small.answers(ecology, name) for name in ("a", "b")}
    small.share(ecology, "a", "b", "c", seed=1, replace=True)
    new = {name: small.answers(ecology, name) for name in ("a", "b", "c")}
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match=r"basis 'joint'.*shared by b, c.*rollback a b c"):
        ecology.rollback(["a"])
    assert small.files(ecology.folder) == before
    ecology.remove(["c"])
    ecology.rollback(["a", "b"])
    assert {name: small.answers(ecology, name) for name in ("a", "b")} == old
    assert verify(ecology.folder) == []
    with pytest.raises(cn.CovNormError, match=r"shared by a, b"):
        ecology.rollback(["c"])
    ecology.rollback(["a", "b", "c"])
    assert {name: small.answers(ecology, name) for name in ("a", "b", "c")} == new
    assert verify(ecology.folder) == []


def test_versions_of_different_times_that_shared_different_bases_are_refused(ecology):
    small.share(ecology, "a", "b")
    ecology.remove(["b"])
    small.share(ecology, "a", "c", seed=1, replace=True)
    ecology.remove(["a", "c"])
    with pytest.raises(cn.CovNormError, match=r"different states of basis 'joint'"):
        ecology.rollback(["a", "b"])
    assert ecology.domains == {}
    ecology.rollback(["a"], to=2)
    ecology.rollback(["b"])
    assert verify(ecology.folder) == []


# ── damage ────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_domain_that_is_replaced_is_not_kept(ecology):
    small.put(ecology, "flowers")
    ecology.blobs.path(ecology.entry("flowers").blobs["tensors"]).write_bytes(b"cut")
    small.put(ecology, "flowers", seed=1, replace=True)
    assert ecology.versions == {}
    assert verify(ecology.folder) == [], "so that replacing a damaged domain heals the store"


@pytest.mark.parametrize("part", ["record", "tensors", "details", "basis"])
def test_a_version_that_was_damaged_since_is_found_and_refused_and_the_store_stays(ecology, part):
    small.share(ecology, "a", "b")
    small.put(ecology, "a", "b", replace=True)
    version = ecology.versions["a"][0]
    assert version.basis is not None
    blob = version.basis["tensors"] if part == "basis" else version.entry.blobs[part]
    file = ecology.blobs.path(blob)
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    problems = verify(ecology.folder)
    assert problems
    assert all(blob in problem for problem in problems)
    owner = "basis 'joint'" if part == "basis" else "version 1 of domain 'a'"
    assert any(owner in problem for problem in problems)
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match=blob):
        ecology.rollback(["a"])
    assert small.files(ecology.folder) == before
    assert small.answers(ecology, "a"), "the current version is served as before"


# ── old stores ────────────────────────────────────────────────────────────────────────────────


def test_a_store_of_the_first_version_opens_and_keeps_versions_from_now_on(tmp_path):
    manifest = json.loads((OLD / MANIFEST).read_bytes())
    assert not {"keep", "earlier"} & set(manifest), "control: it was written before versions"
    house = Ecology(shutil.copytree(OLD, tmp_path / "house"))
    assert (house.keep, house.versions) == (KEEP, {})
    assert [row["current"] for row in house.history("digits")] == [True]
    before = house.entry("alone")
    small.put(house, "alone", replace=True)
    manifest = json.loads((house.folder / MANIFEST).read_bytes())
    assert manifest["keep"] == KEEP
    assert list(manifest["earlier"]) == ["alone"]
    assert manifest["version"] == 1, "version 0.1 can still read it"
    house.rollback(["alone"])
    assert house.entry("alone") == before
    assert verify(house.folder) == []


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────


def test_dropped_versions_are_counted_and_gone_and_a_dry_run_changes_nothing(ecology):
    replaced(ecology, range(4))
    replaced(ecology, range(2), "birds")
    ecology.remove(["birds"])
    left = ecology.blobs.folder / f"{'a' * 64}.json"
    left.write_bytes(b"half")
    before = small.files(ecology.folder)
    sizes = ecology.blobs.sizes()
    for keep, kept in ((None, [3, 0]), (1, [1, 1]), (0, [0, 0])):
        expected = ecology.drop_versions(keep, dry_run=True)
        assert small.files(ecology.folder) == before
        copy = Ecology(shutil.copytree(ecology.folder, ecology.folder.with_name(f"copy {keep}")))
        assert copy.drop_versions(keep) == expected
        assert [len(copy.versions.get(n, ())) for n in ("flowers", "birds")] == kept
        small.assert_tidy(copy.folder)
        assert expected["leftovers"] == 4
        gone = set(sizes) - copy.blobs.names() - {left.name}
        assert expected["versions"] == sum(sizes[blob] for blob in gone) > 0
    with pytest.raises(cn.CovNormError, match="keep="):
        ecology.drop_versions(-1)
