"""Guarantee 11 for training: kill −9 in any stage costs time, and not one bit of the result."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
import torch
import worker
from child import Child

from torch_covnorm import records
from torch_covnorm.training.snapshot import FORMAT, RECORD, Snapshot


def start(case, out, halt=None, **changes):
    return Child(worker.run, case, out, halt, changes)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The files of an uninterrupted run without snapshots, once per case."""
    found: dict[str, dict[str, bytes]] = {}

    def of(case, **changes):
        key = f"{case} {changes}"
        if key not in found:
            out = tmp_path_factory.mktemp("whole")
            assert start(case, out, **changes).result() == "done"
            found[key] = contents(out)
            assert found[key]
        return found[key]

    return of


def killed(case, folder, *places, **changes):
    """Start the case for each place, and kill it there."""
    for place in places:
        child = start(case, folder / "out", place, snapshot=folder / "snapshot", **changes)
        assert child.receive() == place, "the child never came to this place"
        child.kill()
        assert child.was_killed
    assert not (folder / "out").exists()


def resumed(case, folder, **changes):
    child = start(case, folder / "out", snapshot=folder / "snapshot", **changes)
    assert child.result() == "done"
    return contents(folder / "out")


STAGES = {
    "auto": [("digits", "race", 0, 2), ("digits", "train", 1, 2)],
    "covnorm": [
        ("digits", "train", 0, 3),
        ("digits", "train", 1, 4),
        ("digits", "moments", 2),
        ("digits", "tune", 0, 1),
        ("digits", "tune", 0, 3),
    ],
    "lwf": [("digits", "warm-up", 0, 3), ("digits", "train", 0, 1), ("digits", "train", 1, 2)],
    "piggyback": [("digits", "train", 0, 2), ("digits", "train", 1, 3)],
    "covnorm-joint": [
        ("parity", "train", 1, 2),
        ("parity", "moments", 1),
        ("digits", "tune", 0, 2),
        ("parity", "tune", 0, 3),
    ],
    "published": [("digits", "tune-M", 0, 1), ("digits", "tune-M", 0, 3)],
    "smallest": [("digits", "normalize", 0, 7), ("digits", "tune", 0, 2)],
    "declined": [("digits", "tune", 0, 2)],
}


@pytest.mark.parametrize(
    ("case", "place"), [(case, place) for case, places in STAGES.items() for place in places]
)
def test_killed_in_a_stage_and_run_again_the_files_are_the_same_bytes(
    case, place, expected, tmp_path
):
    killed(case, tmp_path, place)
    assert resumed(case, tmp_path) == expected(case)


def test_killed_in_every_stage_in_a_row_the_files_are_the_same_bytes(expected, tmp_path):
    killed("covnorm", tmp_path, *STAGES["covnorm"])
    assert resumed("covnorm", tmp_path) == expected("covnorm")


# Of each save: the tensors' data, their folder, the record's data, its folder.
@pytest.mark.parametrize("write", [2, 21, 22, 23, 24])
def test_killed_in_the_middle_of_a_save_the_files_are_the_same_bytes(write, expected, tmp_path):
    killed("piggyback", tmp_path, ("write", write))
    assert resumed("piggyback", tmp_path) == expected("piggyback")


def test_killed_in_the_middle_of_saves_nothing_is_left_over_in_the_end(tmp_path):
    killed("piggyback", tmp_path, ("write", 5), ("write", 7))
    resumed("piggyback", tmp_path)
    names = sorted(f.name.split("-")[0] for f in (tmp_path / "snapshot" / "train").iterdir())
    assert names == [RECORD, "tensors"]


def test_killed_at_random_moments_in_a_row_the_files_are_the_same_bytes(expected, tmp_path):
    draw, kills, longer = random.Random(0), 0, {"epochs": 8}
    for _ in range(6):
        child = start("covnorm", tmp_path / "out", snapshot=tmp_path / "snapshot", **longer)
        if child.pipe.poll(draw.uniform(0.02, 0.3)):
            assert child.result() == "done"
            break
        child.kill()
        assert child.was_killed
        kills += 1
    assert kills >= 2
    assert resumed("covnorm", tmp_path, **longer) == expected("covnorm", **longer)


def test_a_finished_run_called_again_gives_the_same_bytes(expected, tmp_path):
    first = resumed("covnorm", tmp_path)
    before = contents(tmp_path / "snapshot")
    assert resumed("covnorm", tmp_path) == first == expected("covnorm")
    assert contents(tmp_path / "snapshot") == before
    places: list = []
    worker.adapt("covnorm", places.append, snapshot=tmp_path / "snapshot")
    assert not places, "no stage is run again, and no image is read"


def test_tuning_that_was_declined_has_left_no_bit(expected, tmp_path):
    assert expected("declined") == expected("declined", tuning={"epochs": 0})
    assert expected("declined") != expected("declined", tuning={"epochs": 1}), "a control"


# ── controls ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lost", [False, True])
def test_a_snapshot_without_the_optimisers_state_gives_other_bytes(lost, expected, tmp_path):
    place = ("digits", "train", 1, 2)
    killed("covnorm", tmp_path, place)
    folder = tmp_path / "snapshot" / "train"
    snapshot = Snapshot(folder, records.read(folder / RECORD, FORMAT)["settings"])
    state = snapshot.load()
    assert state["optimizer"]["state"]
    if lost:
        state["optimizer"]["state"] = {}
    snapshot.save(state)
    assert (resumed("covnorm", tmp_path) == expected("covnorm")) != lost


def test_another_seed_gives_other_bytes_and_refuses_this_ones_snapshot(expected, tmp_path):
    assert expected("covnorm", seed=1) != expected("covnorm")
    killed("covnorm", tmp_path, ("digits", "train", 1, 2))
    child = start("covnorm", tmp_path / "out", snapshot=tmp_path / "snapshot", seed=1)
    assert f"{RECORD}: was made with seed=0" in child.result()
    assert not (tmp_path / "out").exists()


# ── without a kill ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", STAGES)
def test_called_again_on_the_same_network_after_an_error_the_files_are_the_same_bytes(
    case, expected, tmp_path
):
    """A notebook's user interrupts and calls again: the network was left as it had been."""
    net = worker.network()

    def stop(place):
        if place == STAGES[case][-1]:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        worker.adapt(case, stop, net, snapshot=tmp_path / "snapshot")
    assert not list(net.domains)
    assert not list(net.bases)
    worker.adapt(case, net=net, snapshot=tmp_path / "snapshot")
    worker.save(net, tmp_path / "out")
    assert contents(tmp_path / "out") == expected(case)


@pytest.mark.parametrize("case", STAGES)
def test_the_seed_alone_decides_whatever_was_drawn_before(case, expected, tmp_path):
    net = worker.network()
    torch.manual_seed(12345)
    worker.save(worker.adapt(case, net=net), tmp_path)
    assert contents(tmp_path) == expected(case)


def test_another_seed_begins_with_other_numbers(tmp_path):
    for seed in (0, 1):
        net = worker.adapt("lwf", epochs=0, warm_up=0, seed=seed)
        worker.save(net, tmp_path / str(seed))
    assert contents(tmp_path / "0") != contents(tmp_path / "1")


@pytest.mark.parametrize("case", STAGES)
def test_the_callers_random_numbers_are_untouched(case):
    net = worker.network()
    before = torch.get_rng_state()
    classes = {} if case == "covnorm-joint" else {"classes": None}  # counted by the loader
    worker.adapt(case, net=net, **classes)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_domain_that_was_there_goes_on_after_an_error_too(tmp_path):
    """Added by hand, interrupted in training: half a training is not a trained A."""

    def with_digits():
        net = worker.network()
        net.add_domain("digits", classes=10)
        return net

    def stop(place):
        if place == ("digits", "train", 0, 3):
            raise KeyboardInterrupt

    worker.save(worker.adapt("covnorm", net=with_digits()), tmp_path / "whole")
    net = with_digits()
    with contextlib.suppress(KeyboardInterrupt):
        worker.adapt("covnorm", stop, net, snapshot=tmp_path / "snapshot")
    worker.save(worker.adapt("covnorm", net=net, snapshot=tmp_path / "snapshot"), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
