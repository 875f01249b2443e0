"""Guarantee 11: kill −9 at any moment of an `add` leaves the store as before or as after it."""

from __future__ import annotations

import random
import shutil
import time

import adder
import pytest
import small_ecology as small
from adder import start

import torch_covnorm as cn
from torch_covnorm.ecology import Ecology, verify
from torch_covnorm.ecology.manifest import MANIFEST
from torch_covnorm.training.progress import Reporter

TIMED = 16  # kills by the clock; the others at chosen events


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """An ecology with another domain, to which "digits" is added again and again."""
    folder = tmp_path_factory.mktemp("killed") / "house"
    ecology = Ecology.create(folder, small.backbone())
    small.put(ecology, "other")
    return folder


class Whole:
    """An uninterrupted add: its events, its duration, the blobs that it writes."""

    def __init__(self, folder):
        child = start("adding", folder, None)
        begun = time.monotonic()
        outcome, self.events = child.result()
        self.seconds = time.monotonic() - begun
        assert outcome == "done", self.events
        ecology = Ecology(folder)
        self.blobs = ecology.entry("digits").blobs
        self.other = ecology.entry("other")
        self.bytes = {b: ecology.blobs.read(b) for b in self.other.blobs.values()}
        ecology.remove(["digits"], purge=True)
        kinds = [kind for kind, _ in self.events]
        self.steps = kinds.count("step")
        self.manifest = self.events.index(("rename", MANIFEST))
        self.store = self.events.index(("stage", "store"))

    def steps_left(self, kill):
        """Count the steps after the last snapshot that was complete before this event."""
        saved = [i for i in range(kill) if self.events[i] == ("rename", "snapshot.json")]
        first = saved[-1] if saved else 0
        return sum(kind == "step" for kind, _ in self.events[first:])

    def places(self, draw):
        """Choose events to be killed at: some of every type, and all around the commit."""
        kinds = {}
        for i, (kind, _) in enumerate(self.events[: self.store]):
            kinds.setdefault(kind, []).append(i)
        chosen = [
            i for kind in sorted(kinds) for i in draw.sample(kinds[kind], min(5, len(kinds[kind])))
        ]
        blobs = range(self.store + 1, self.manifest - 1)
        after = range(self.manifest + 1, len(self.events))
        around = [self.manifest - 1, self.manifest, self.manifest + 1]
        chosen += [*draw.sample(blobs, 10), *around, *draw.sample(after[1:], 5)]
        return sorted(chosen)


@pytest.fixture(scope="module")
def known(house):
    return Whole(house)


@pytest.fixture
def whole(house, known):
    yield known
    shutil.rmtree(Ecology(house).workplace("digits"), ignore_errors=True)
    if "digits" in Ecology(house).domains:
        Ecology(house).remove(["digits"], purge=True)


def assert_before_or_after(folder, whole):
    """Check that the store is whole; return whether it has the domain."""
    assert verify(folder) == []
    ecology = Ecology(folder)
    assert ecology.entry("other") == whole.other
    for blob, data in whole.bytes.items():
        assert (folder / "blobs" / blob).read_bytes() == data
    if "digits" not in ecology.domains:
        return False
    assert ecology.entry("digits").blobs["tensors"] == whole.blobs["tensors"]
    small.read(ecology, "digits")
    return True


def add_again(folder, whole):
    """Run the same add in this process: same result, nothing left over. Return its steps."""
    steps = []
    exists = "digits" in Ecology(folder).domains
    if exists:
        with pytest.raises(cn.CovNormError, match="'digits' already exists"):
            adder.add_digits(folder, Reporter())
    adder.add_digits(folder, Reporter(training=steps.append), replace=exists)
    ecology = Ecology(folder)
    same = ("tensors", "trained.tensors", "record", "trained.record", "moments", "examples")
    blobs = ecology.entry("digits").blobs
    assert {k: blobs[k] for k in same} == {k: whole.blobs[k] for k in same}
    small.assert_tidy(folder)
    assert not ecology.workplace("digits").exists()
    assert verify(folder) == []
    ecology.remove(["digits"], purge=True)
    return len(steps)


def test_the_events_are_those_of_every_stage_and_the_commit(whole):
    """The kills below are chosen from these."""
    stages = [what for kind, what in whole.events if kind == "stage"]
    assert [stages[0], *stages[-2:]] == ["choose", "measure", "store"]
    assert {what for kind, what in whole.events if kind == "step"} == {"train", "collect", "tune"}
    names = [what for kind, what in whole.events[whole.store :] if kind == "rename"]
    assert names[-1] == MANIFEST, "the manifest comes last"
    assert set(names[:-1]) == set(whole.blobs.values())
    assert whole.manifest + 4 < len(whole.events), "the workplace goes after the commit"


def test_killed_at_fifty_random_moments_the_store_is_whole_and_the_next_add_resumes(house, whole):
    draw = random.Random(0)
    places = whole.places(draw)
    committed = resumed = kills = 0
    for place in places:
        child = start("adding", house, place)
        assert child.was_killed, f"event {place} never came"
        kills += 1
        after = assert_before_or_after(house, whole)
        assert after == (place > whole.manifest), f"event {place} {whole.events[place]}"
        steps = add_again(house, whole)
        if not after:
            assert steps == whole.steps_left(place), f"event {place} {whole.events[place]}"
            resumed += steps < whole.steps
        committed += after
    assert resumed > 15, "these did not start over"
    assert committed >= 5
    while kills < len(places) + TIMED:
        child = start("adding", house, None)
        child.pipe.poll(draw.uniform(0, whole.seconds))
        child.kill()
        kills += child.was_killed
        assert_before_or_after(house, whole)
        assert add_again(house, whole) <= whole.steps
    assert kills >= 50


def test_killed_again_and_again_the_add_comes_to_its_end(house, whole):
    """No process in between survives: each one is killed a little later than the last."""
    for place in range(5, 60, 11):
        child = start("adding", house, place)
        if not child.was_killed:
            break
        assert_before_or_after(house, whole)
    assert start("adding", house, None).result()[0] == "done" or "digits" in Ecology(house).domains
    add_again(house, whole)


def test_killed_while_unfinished_work_is_cleared_the_next_add_goes_on(house, whole, tmp_path):
    """fresh=True is killed while it deletes old work: what is left does not trap the next run."""
    assert start("adding", house, whole.store).was_killed  # all stages are in the workplace
    work = Ecology(house).workplace("digits")
    saved = shutil.copytree(work, tmp_path / "saved")
    inside = sum(1 for _ in work.rglob("*"))
    trapped = []
    for place in range(1, inside, 2):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(saved, work)
        assert start("adding", house, place, fresh=True).was_killed
        assert not assert_before_or_after(house, whole)
        try:
            add_again(house, whole)
        except cn.CovNormError as error:
            trapped.append(f"event {place}: {error}")
    assert not trapped


def test_a_manifest_before_its_blobs_would_be_found(house, whole):
    """Control: it is the order of the writes that the kills prove."""
    names = ("other", "digits")
    child = start("adding", house, whole.store + 4, broken="manifest_first")
    assert child.was_killed
    with pytest.raises(AssertionError):
        assert_before_or_after(house, whole)
    assert set(Ecology(house).domains) == set(names)
    Ecology(house).remove(["digits"], purge=True)
    assert not assert_before_or_after(house, whole)
    add_again(house, whole)
