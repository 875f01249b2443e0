"""Guarantees 12, 13 and 15 for the store: damage is found by name, forgeries are refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import small_ecology as small
from command import covnorm

import torch_covnorm as cn
from torch_covnorm.ecology import Ecology, blobs, verify
from torch_covnorm.ecology.manifest import MANIFEST, Manifest

# ── damage ────────────────────────────────────────────────────────────────────────────────────


def flipped(data):
    """Flip one bit, anywhere."""
    bit = random.Random(len(data)).randrange(8 * len(data))
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


DAMAGE = {
    "flipped": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "one byte short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file: file.write_bytes(b""),
    "gone": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "another's": lambda file: shutil.copy(
        next(f for f in sorted(file.parent.iterdir()) if f != file and f.suffix == file.suffix),
        file,
    ),
}


def restore(file, data):
    if file.is_dir():
        file.rmdir()
    file.write_bytes(data)


@pytest.mark.slow
def test_the_store_that_is_damaged_below_has_blobs_of_every_kind(made):
    parts = {part for entry in made.domains.values() for part in entry.blobs}
    assert parts == {
        "record",
        "tensors",
        "details",
        "trained.record",
        "trained.tensors",
        "moments",
        "examples",
    }
    assert set(made.bases["joint"]) == {"record", "tensors", "moments"}
    assert verify(made.folder) == []


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.slow
def test_each_damaged_blob_is_found_and_named_and_costs_no_other_domain(house, whole, damage):
    named = sorted(Manifest.read(house.file).references())
    assert len(named) > 20
    for blob in named:
        file = house.blobs.path(blob)
        data = file.read_bytes()
        DAMAGE[damage](file)
        problems = verify(house.folder)
        assert any(str(file) in problem for problem in problems), (blob, problems)
        for name in house.domains:
            if blob in small.blobs_of(house, name):
                with pytest.raises(cn.CovNormError, match=blob):
                    small.read(house, name)
            elif damage in ("flipped", "gone"):
                assert small.answers(house, name) == whole[name][4]
        restore(file, data)
    assert verify(house.folder) == []
    assert {name: small.read(house, name) for name in house.domains} == whole


def test_all_damaged_blobs_at_once_are_all_found(house):
    named = sorted(Manifest.read(house.file).references())
    for blob in named:
        DAMAGE["flipped"](house.blobs.path(blob))
    problems = "\n".join(verify(house.folder))
    assert [blob for blob in named if blob not in problems] == []


def test_a_damaged_domain_can_be_removed_and_others_added_beside_it(house, whole):
    blobs = small.blobs_of(house, "alone") - small.blobs_of(house, "digits")
    assert len(blobs) > 4
    for blob in blobs:
        DAMAGE["cut"](house.blobs.path(blob))
    small.put(house, "new")
    assert small.read(house, "digits") == whole["digits"]
    house.remove(["alone"])
    assert verify(house.folder) == []


def test_without_comparing_the_checksum_a_flipped_number_would_load(house, whole, monkeypatch):
    """Control: it is the checksum that finds a flipped bit of a tensor."""
    file = house.blobs.path(house.entry("alone").blobs["tensors"])
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    assert len(verify(house.folder)) == 1
    monkeypatch.setattr(blobs, "read_whole", lambda file, _: file.read_bytes())
    assert verify(house.folder) == []
    small.answers(house, "alone")


def test_a_failed_load_leaves_the_network_as_it_was(house):
    net = house.network(small.backbone())
    DAMAGE["cut"](house.blobs.path(house.entry("digits").blobs["tensors"]))
    with pytest.raises(cn.CovNormError):
        house.load(net, "digits")
    assert not list(net.domains)
    assert not list(net.bases), "a basis without a domain"
    house.load(net, "parity")
    assert list(net.bases) == ["joint"]


# ── the manifest ──────────────────────────────────────────────────────────────────────────────


def assert_manifest_refused(folder, opened=None):
    """Check that opening, using an open one and `verify` all refuse it and name the file."""
    with pytest.raises(cn.CovNormError, match=MANIFEST):
        Ecology(folder)
    (problem,) = verify(folder)
    assert MANIFEST in problem
    if opened is not None:
        with pytest.raises(cn.CovNormError, match=MANIFEST):
            opened.domains  # noqa: B018
        with pytest.raises(cn.CovNormError, match=MANIFEST):
            small.put(opened, "new")


@pytest.mark.parametrize("damage", ["flipped", "cut", "one byte short", "longer", "empty", "gone"])
def test_a_damaged_manifest_is_refused_by_name_and_no_blob_is_lost(house, whole, damage):
    file = house.folder / MANIFEST
    data, before = file.read_bytes(), small.files(house.folder)
    DAMAGE[damage](file)
    assert_manifest_refused(house.folder, house)
    file.write_bytes(data)
    assert small.files(house.folder) == before
    assert verify(house.folder) == []


def test_one_flipped_bit_anywhere_in_the_manifest_is_refused(house):
    file = house.folder / MANIFEST
    data = file.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(data)), 150):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(cn.CovNormError, match=MANIFEST):
            Ecology(house.folder)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "null", "3", '{"format": "torch-covnorm ecology"}', "\xff", "[" * 100_000, "NaN"],
    ids=lambda t: repr(t[:12]),
)
def test_other_json_in_the_manifests_place_is_refused_by_name(house, text):
    (house.folder / MANIFEST).write_bytes(text.encode("latin-1"))
    assert_manifest_refused(house.folder, house)


def test_a_record_of_another_kind_in_the_manifests_place_is_refused(house):
    blob = house.blobs.path(house.entry("alone").blobs["record"])
    shutil.copy(blob, house.folder / MANIFEST)
    assert_manifest_refused(house.folder)


def test_a_new_ecology_is_not_begun_over_the_blobs_of_one_that_lost_its_manifest(house):
    """Its next change would sweep every domain away."""
    (house.folder / MANIFEST).unlink()
    blobs = {f.name for f in (house.folder / "blobs").iterdir()}
    with pytest.raises(cn.CovNormError, match="blobs"):
        Ecology.create(house.folder, small.backbone())
    assert {f.name for f in (house.folder / "blobs").iterdir()} == blobs


def test_the_command_tells_of_damage_in_one_line_and_with_exit_code_2(house):
    where = ("--json", "--ecology", house.folder, "--quiet")
    assert covnorm("verify", *where).json == {"ok": True, "problems": []}
    file = house.blobs.path(house.entry("alone").blobs["tensors"])
    DAMAGE["flipped"](file)
    done = covnorm("verify", *where)
    assert done.code == 2
    (problem,) = done.json["problems"]
    assert file.name in problem
    DAMAGE["cut"](house.folder / MANIFEST)
    done = covnorm("verify", *where)
    assert done.code == 2
    assert MANIFEST in done.json["problems"][0]
    listed = covnorm("list", *where)
    assert listed.code == 2
    assert listed.err.count("\n") == 1
    assert MANIFEST in listed.err
