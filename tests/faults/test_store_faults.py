"""Guarantees 12 and 14: full disks, read-only folders, many writers and readers at once."""

from __future__ import annotations

import contextlib
import os
import subprocess

import adder
import pytest
import small_ecology as small
import torch
from adder import start

import torch_covnorm as cn
from torch_covnorm.ecology import Details, Ecology, verify
from torch_covnorm.ecology.manifest import MANIFEST
from torch_covnorm.training.progress import Reporter


@pytest.fixture
def house(tmp_path):
    ecology = Ecology.create(tmp_path / "house", small.backbone())
    small.put(ecology, "other")
    return ecology


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The tensors of an add on a disk with room enough."""
    ecology = Ecology.create(tmp_path_factory.mktemp("expected") / "house", small.backbone())
    adder.add_digits(ecology.folder, Reporter())
    return ecology.entry("digits").blobs["tensors"]


# ── at once ───────────────────────────────────────────────────────────────────────────────────


def test_two_processes_that_add_at_once_are_both_there(house, expected):
    children = [
        start("adding", house.folder, None, name=n, seed=s) for n, s in (("a", 0), ("b", 1))
    ]
    assert [child.result()[0] for child in children] == ["done", "done"]
    assert set(house.domains) == {"other", "a", "b"}
    assert house.entry("a").blobs["tensors"] == expected
    assert verify(house.folder) == []
    small.assert_tidy(house.folder)


def test_two_processes_that_add_the_same_name_at_once_one_is_refused(house, expected):
    children = [start("adding", house.folder, None) for _ in range(2)]
    results = sorted(child.result() for child in children)
    assert [word for word, _ in results] == ["done", "error"]
    message = results[1][1]
    assert "another process is adding domain 'digits'" in message or "already" in message
    assert house.entry("digits").blobs["tensors"] == expected
    assert verify(house.folder) == []


def writers(folder, broken=None, rounds=3):
    """Run four processes that put, replace and remove; return the names and their results."""
    names = [[f"w{i}-{j}" for j in range(2)] for i in range(4)]
    children = [start("putting", folder, mine, rounds, broken=broken) for mine in names]
    return {n for mine in names for n in mine}, [child.result() for child in children]


def test_four_processes_that_write_at_once_lose_no_update_and_no_blob(house):
    names, results = writers(house.folder)
    assert {word for word, _ in results} == {"done"}, results
    assert set(house.domains) == {"other", *names}
    assert verify(house.folder) == []
    small.assert_tidy(house.folder)
    for name in names:
        net = small.network(name, seed=2)
        loaded = house.network(small.backbone())
        mine = net.domain(name).state_dict()
        found = house.load(loaded, name).state_dict()
        assert all(torch.equal(mine[k], found[k]) for k in mine)


def test_without_the_lock_updates_would_be_lost(house):
    """Control: it is the lock that the four processes prove."""
    names, results = writers(house.folder, broken="without_lock", rounds=2)
    whole = {word for word, _ in results} == {"done"} and set(house.domains) == {"other", *names}
    assert not (whole and verify(house.folder) == [])


def test_readers_never_see_an_error_while_another_process_replaces_what_they_read(house):
    small.put(house, "digits")
    child = start("replacing", house.folder, ["digits", "other"])
    seen = set()
    try:
        for i in range(60):
            reader = Ecology(house.folder) if i % 2 else house
            seen.add(small.answers(reader, ("digits", "other")[i % 3 % 2]))
            reader.details("digits")
            assert set(reader.domains) == {"digits", "other"}
            if i % 10 == 0:
                assert reader.record("digits")["name"] == "digits"
    finally:
        child.pipe.send("stop")
        word, replaced = child.result()
    assert word == "done"
    assert replaced > 5, "nothing was replaced: this proved nothing"
    assert len(seen) > 5, "the readers saw only old ones"
    assert verify(house.folder) == []


# ── a full disk ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    with small.mounted("-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)) as done:
        if not done:
            pytest.skip("mounting a small disk needs root; the test with a file limit runs anyway")
        ecology = Ecology.create(place / "house", small.backbone())
        small.put(ecology, "other")
        yield ecology


def fill(ecology, left):
    """Fill the disk up to so many bytes; return the file to remove."""
    filler = ecology.folder.parent / "filler"
    free = os.statvfs(ecology.folder).f_bavail * os.statvfs(ecology.folder).f_bsize
    filler.write_bytes(b"\1" * max(free - left, 0))
    return filler


@pytest.mark.parametrize("left", [0, 12_288, 32_768, 49_152, 65_536, 86_016])
def test_a_disk_that_fills_up_is_an_error_that_names_the_file_and_costs_nothing(
    small_disk, left, expected
):
    before = small.files(small_disk.folder)
    filler = fill(small_disk, left)
    with pytest.raises(cn.CovNormError, match="No space left on device") as raised:
        adder.add_digits(small_disk.folder, Reporter())
    assert str(small_disk.folder) in str(raised.value)
    assert "--fresh" not in str(raised.value), "starting over makes no room"
    assert small.files(small_disk.folder) == before
    assert verify(small_disk.folder) == []
    filler.unlink()
    adder.add_digits(small_disk.folder, Reporter())
    assert small_disk.entry("digits").blobs["tensors"] == expected
    assert verify(small_disk.folder) == []
    small.assert_tidy(small_disk.folder)


@pytest.mark.parametrize("left", [0, 4096, 12_288, 24_576])
def test_a_disk_that_is_full_at_the_commit_costs_no_training(small_disk, left, expected):
    before = small.files(small_disk.folder)
    fillers = []

    def stage(what, _):
        if what == "store":
            fillers.append(fill(small_disk, left))

    with pytest.raises(cn.CovNormError, match="No space left on device") as raised:
        adder.add_digits(small_disk.folder, Reporter(stage=stage))
    assert "house/blobs/" in str(raised.value) or MANIFEST in str(raised.value)
    assert small.files(small_disk.folder) == before
    fillers[0].unlink()
    steps = []
    adder.add_digits(small_disk.folder, Reporter(training=steps.append))
    assert steps == []
    assert small_disk.entry("digits").blobs["tensors"] == expected


def test_on_a_full_disk_domains_are_still_read_and_removed(small_disk):
    small.put(small_disk, "more")
    fill(small_disk, 8192)
    small.read(small_disk, "other")
    small_disk.remove(["other"])
    assert list(small_disk.domains) == ["more"]
    assert verify(small_disk.folder) == []


@pytest.mark.parametrize("size", [200, 3000, 6000])
def test_a_file_that_cannot_be_written_whole_is_an_error_that_names_it(house, size, expected):
    """As a full disk, for those who may not mount one."""
    before = small.files(house.folder)
    word, message = start("limited", house.folder, size).result()
    assert word == "error", message
    assert "File too large" in message
    assert str(house.folder) in message
    assert small.files(house.folder) == before
    assert verify(house.folder) == []
    adder.add_digits(house.folder, Reporter())
    assert house.entry("digits").blobs["tensors"] == expected


# ── a read-only folder ────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def read_only(folder):
    with small.mounted("--bind", str(folder), str(folder)) as done:
        if done:
            command = ["mount", "-o", "remount,ro,bind", str(folder)]
            done = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if not done:
            pytest.skip("a folder that root cannot write to needs a mount")
        yield


WRITES = {
    "add": lambda e: adder.add_digits(e.folder, Reporter()),
    "put": lambda e: small.put(e, "more"),
    "replace": lambda e: small.put(e, "other", seed=1, replace=True),
    "remove": lambda e: e.remove(["other"]),
    "create": lambda e: Ecology.create(e.folder / "inside", small.backbone()),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_read_only_folder_is_an_error_that_names_it_and_reading_goes_on(house, write):
    before, files = small.read(house, "other"), small.files(house.folder)
    with read_only(house.folder):
        with pytest.raises(cn.CovNormError, match="Read-only file system") as raised:
            WRITES[write](house)
        assert str(house.folder) in str(raised.value)
        assert small.read(Ecology(house.folder), "other") == before
        assert verify(house.folder) == []
    assert small.files(house.folder) == files
    WRITES[write](house)
    assert verify(house.folder) == []


@pytest.mark.parametrize("write", ["put", "replace", "remove"])
def test_read_only_blobs_are_an_error_that_names_them_and_the_store_stays_whole(house, write):
    (house.folder / "blobs" / f"{'a' * 64}.json").write_bytes(b"left by one that was killed")
    before = small.answers(house, "other")
    with read_only(house.folder / "blobs"):
        with contextlib.suppress(cn.CovNormError):  # a removal may succeed and leave its blobs
            WRITES[write](house)
        assert verify(house.folder) == []
        if "other" in house.domains:
            assert small.answers(house, "other") == before
    small.put(house, "last")
    small.assert_tidy(house.folder)


def test_a_disk_that_fails_when_the_manifest_is_replaced_leaves_the_old_one(house, monkeypatch):
    """EIO at the very last step: the blobs are there, nobody names them, and they go again."""
    from torch_covnorm.ecology import manifest

    before = small.files(house.folder)

    def fails(file, data):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "write_file", fails)
    net = small.network("more")
    with pytest.raises(cn.CovNormError, match=rf"{MANIFEST}: Input/output error"):
        house.put(net, {"more": Details(small.facts())})
    assert small.files(house.folder) == before
    assert list(house.domains) == ["other"]
