"""Guarantees 11 and 14 for `rollback`: kill −9 at any moment, and other processes at once."""

from __future__ import annotations

import shutil

import pytest
import small_ecology as small
from adder import start

from torch_covnorm.ecology import Ecology, verify
from torch_covnorm.ecology.manifest import MANIFEST


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Two joint domains that were replaced by others, with another basis."""
    folder = tmp_path_factory.mktemp("rolled") / "house"
    ecology = Ecology.create(folder, small.backbone())
    small.put(ecology, "other")
    for seed in (0, 1):
        small.share(ecology, "a", "b", seed=seed, replace=True)
    return folder


def state(folder):
    """Check that the store is whole; return its domains and their versions."""
    assert verify(folder) == []
    small.assert_tidy(folder)
    ecology = Ecology(folder)
    earlier = {name: [v.digest for v in found] for name, found in ecology.versions.items()}
    return {n: small.answers(ecology, n) for n in ecology.domains}, ecology.bases, earlier


def test_killed_at_every_event_of_a_rollback_the_store_is_as_before_or_after_it(house, tmp_path):
    before = state(house)
    whole = shutil.copytree(house, tmp_path / "whole")
    word, events = start("rolling", whole, ["a", "b"], None).result()
    assert word == "done", events
    after = state(whole)
    assert after != before
    commit = events.index(("rename", MANIFEST))
    assert 0 < commit < len(events) - 1
    for place in range(len(events)):
        copy = shutil.copytree(house, tmp_path / f"killed {place}")
        assert start("rolling", copy, ["a", "b"], place).was_killed, f"event {place} never came"
        with Ecology(copy)._changing():  # the next change removes temporary files
            pass
        assert state(copy) == (after if place > commit else before), events[place]


def test_processes_that_roll_back_and_write_at_once_lose_nothing(house, tmp_path):
    folder = shutil.copytree(house, tmp_path / "house")
    ecology = Ecology(folder)
    ecology.set_keep(50)
    small.put(ecology, "flowers")
    small.put(ecology, "flowers", seed=99, replace=True)
    answers = state(folder)
    children = [
        start("rolling_often", folder, "flowers", 9),
        start("putting", folder, ["flowers", "more"], 4),
        start("rolling_often", folder, "flowers", 9),
    ]
    assert [child.result()[0] for child in children] == ["done"] * 3
    assert set(ecology.domains) == {"other", "a", "b", "flowers", "more"}
    digests = [row["digest"] for row in ecology.history("flowers")]
    # Seeds 0 to 3 and 99; seed 0 was there before. Each of them is still there, exactly once.
    assert len(digests) == len(set(digests)) == 5
    found = set()
    for row in ecology.history("flowers"):
        if not row["current"]:
            ecology.rollback(["flowers"], to=row["digest"])
        found.add(small.answers(ecology, "flowers"))
    nets = Ecology.create(tmp_path / "expected", small.backbone())
    wanted = set()
    for seed in (0, 1, 2, 3, 99):
        small.put(nets, "flowers", seed=seed, replace=True)
        wanted.add(small.answers(nets, "flowers"))
    assert found == wanted
    now = state(folder)
    assert {n: now[0][n] for n in ("a", "b", "other")} == {
        n: answers[0][n] for n in ("a", "b", "other")
    }


def test_without_the_lock_versions_would_be_lost(house, tmp_path):
    """Control: it is the lock that the test above proves."""
    folder = shutil.copytree(house, tmp_path / "house")
    ecology = Ecology(folder)
    ecology.set_keep(50)
    small.put(ecology, "flowers", seed=99)
    small.put(ecology, "flowers", replace=True)
    children = [
        start("putting", folder, ["flowers", "more"], 4, broken="without_lock"),
        start("rolling_often", folder, "flowers", 9, broken="without_lock"),
        start("putting", folder, ["flowers", "others"], 4, broken="without_lock"),
    ]
    done = [child.result()[0] for child in children] == ["done"] * 3
    whole = done and set(ecology.domains) == {"other", "a", "b", "flowers", "more", "others"}
    assert not (whole and len(ecology.history("flowers")) == 5 and verify(folder) == [])
