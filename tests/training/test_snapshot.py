"""Interrupted training resumes to the same bits; damaged or foreign snapshots are errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from small_digits import backbone, batches, digits, network, noisy, regression, same, state
from torch.utils.data import DataLoader, TensorDataset

import torch_covnorm as cn
from torch_covnorm import CovNormError
from torch_covnorm.stats.moments import Moments
from torch_covnorm.training.fit import Loop
from torch_covnorm.training.snapshot import (
    RECORD,
    Snapshot,
    SnapshotMismatch,
    restore_,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def bits(value):
    """A nested state with tensors as (dtype, shape, bytes): equal means equal to the bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(bits(v) for v in value)
    return (type(value), value)


def round_trip(folder, value):
    Snapshot(folder, {"a": 1}).save(value)
    return Snapshot(folder, {"a": 1}).load()


# ── the file ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back_to_the_bit(dtype, tmp_path):
    x = (100 * torch.randn(3, 4)).to(dtype)
    value = {"x": x, "t": x.T, "part": x[1:, ::2], "scalar": x[0, 0], "empty": x[:0], "grad": None}
    if dtype.is_floating_point:
        odd = torch.tensor([float("nan"), float("inf"), -0.0, torch.finfo(dtype).tiny / 4])
        value |= {"odd": odd.to(dtype), "grad": x.clone().requires_grad_(True)}
    assert bits(round_trip(tmp_path, value)) == bits(value)


def test_a_nested_state_comes_back_with_its_types(tmp_path):
    t = torch.randn(2)
    value = {
        "none": None,
        "flags": [True, False, 1, 0, 1.0, -0.0, 0.1, 2**53 + 1, "grün\n/"],
        "tuple": (t, [t + 1, (t + 2, {})], ()),
        7: {0: t, 1: {"step": torch.tensor(3.0), "betas": (0.9, 0.999)}},
        "": [],
        "tensor": {"tensor": t},
        "dict": {"list": [{}]},
    }
    assert bits(round_trip(tmp_path, value)) == bits(value)


def test_two_views_of_one_tensor_come_back_apart(tmp_path):
    t = torch.randn(4)
    result = round_trip(tmp_path, {"a": t, "b": t, "c": t[:2]})
    assert bits(result) == bits({"a": t, "b": t, "c": t[:2]})


@pytest.mark.parametrize(
    "value",
    [
        {1: torch.ones(1), "1": torch.zeros(1)},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"a": [torch.ones(1)], "a/0": torch.zeros(1)},
    ],
    ids=["int and str", "slash", "list"],
)
def test_keys_that_look_alike_are_kept_apart_or_refused(value, tmp_path):
    try:
        result = round_trip(tmp_path, value)
    except CovNormError:
        return
    assert bits(result) == bits(value)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, 1j, object(), Path("a"), b"a", len, torch.float32],
    ids=["set", "complex", "object", "path", "bytes", "function", "dtype"],
)
def test_what_cannot_be_kept_is_refused_and_the_old_state_stays(value, tmp_path):
    old = {"x": torch.ones(2)}
    round_trip(tmp_path, old)
    with pytest.raises(CovNormError):
        Snapshot(tmp_path, {"a": 1}).save({"x": torch.zeros(2), "deep": [(value,)]})
    assert bits(Snapshot(tmp_path, {"a": 1}).load()) == bits(old)


def test_what_cannot_be_kept_is_named(tmp_path):
    with pytest.raises(CovNormError, match=r"deep/0.*set"):
        Snapshot(tmp_path, {}).save({"deep": [{1}]})


def test_nothing_saved_is_none_and_saving_keeps_one_tensor_file(tmp_path):
    snapshot = Snapshot(tmp_path / "deep" / "er", {"a": 1})
    assert snapshot.load() is None
    for i in range(3):
        snapshot.save({"i": torch.tensor(i)})
    names = sorted(f.name.split("-")[0] for f in (tmp_path / "deep" / "er").iterdir())
    assert names == [RECORD, "tensors"]
    assert snapshot.load() == {"i": torch.tensor(2)}


def test_a_save_replaces_the_record_whole_and_never_writes_into_it(tmp_path):
    Snapshot(tmp_path, {}).save({"i": 1})
    held = tmp_path / "held"
    held.hardlink_to(tmp_path / RECORD)
    before = held.read_bytes()
    Snapshot(tmp_path, {}).save({"i": 2})
    assert held.read_bytes() == before != (tmp_path / RECORD).read_bytes()


def test_due_is_a_matter_of_seconds(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    snapshot = Snapshot(tmp_path, {}, every=20)
    assert not snapshot.due()
    clock[0] = 120.0
    assert snapshot.due()
    snapshot.save({})
    assert not snapshot.due()
    assert Snapshot(tmp_path, {}, every=0).due()


@pytest.mark.parametrize("now", [{"a": 1, "b": 3}, {"a": 1}, {"a": 1, "b": 2, "c": 3}])
def test_other_settings_are_refused_by_name_and_file(now, tmp_path):
    Snapshot(tmp_path, {"a": 1, "b": 2}).save({})
    differs = "c" if "c" in now else "b"
    with pytest.raises(SnapshotMismatch, match=f"{RECORD}.*made with {differs}=") as error:
        Snapshot(tmp_path, now).load()
    assert str(tmp_path) in str(error.value)
    was = {"a": 1, "b": 2}.get(differs)
    assert (error.value.key, error.value.was, error.value.now) == (differs, was, now.get(differs))
    assert isinstance(error.value, CovNormError)


DAMAGES = itertools.product(["json", "tensors"], ["truncated", "empty", "flipped", "noise"])


@pytest.mark.parametrize(("which", "damage"), [*DAMAGES, ("tensors", "missing")])
def test_a_damaged_snapshot_is_a_clear_error_that_names_the_file(which, damage, tmp_path):
    Snapshot(tmp_path, {"a": 1}).save({"x": torch.randn(50), "y": [0.5]})
    (file,) = tmp_path.glob(RECORD if which == "json" else "*.safetensors")
    data = file.read_bytes()
    places = {"truncated": range(1, len(data), 97), "flipped": range(0, len(data), 31)}
    for at in places.get(damage, [0]):
        file.unlink(missing_ok=True)
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        wrong = {"truncated": data[:at], "empty": b"", "flipped": flipped, "noise": b"\x80\x04K."}
        if damage != "missing":
            file.write_bytes(wrong[damage])
        with pytest.raises(CovNormError) as error:
            Snapshot(tmp_path, {"a": 1}).load()
        assert str(file) in str(error.value)


def test_nothing_in_a_snapshot_is_pickled(tmp_path, monkeypatch):
    import pickle

    def never(*_, **__):
        raise AssertionError("pickled")

    for name in ("dumps", "dump", "loads", "load"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "save", never)
    monkeypatch.setattr(torch, "load", never)
    net = network()
    one = {"epochs": 1, "progress": False, "snapshot": tmp_path}
    cn.fit(net, "digits", batches(), **one)
    cn.fit(network(), "digits", batches(), **one)
    json.loads((tmp_path / RECORD).read_text())


def test_moments_come_back_to_the_bit(tmp_path):
    moments = {s: Moments(3).update(torch.randn(9, 3)) for s in ("conv1", "layer.0/x")}
    assert Snapshot(tmp_path, {"a": 1}).load() is None
    Snapshot(tmp_path, {"a": 1}).save({site: m.state_dict() for site, m in moments.items()})
    states = Snapshot(tmp_path, {"a": 1}).load()
    result = {site: Moments.from_state(state) for site, state in states.items()}
    assert {k: bits(m.state_dict()) for k, m in result.items()} == {
        k: bits(m.state_dict()) for k, m in moments.items()
    }


def test_a_state_of_another_domain_is_refused_and_changes_nothing():
    net = network()
    before = state(net)
    other = {k: v + 1 for k, v in state(net, "other").items()}
    with pytest.raises(CovNormError, match="another domain"):
        restore_(net.domain("digits"), other)
    assert same(state(net), before)


# ── fit resumes ───────────────────────────────────────────────────────────────────────────────


class Interrupted(Exception):
    pass


def run(folder=None, stop=None, workers=0, generator=None, **changes):
    """Train with shuffling, augmentation, dropout and head_lr; interrupt after `stop` steps."""
    net, count = network(dropout=0.3), iter(range(10**6))
    g = None if generator is None else torch.Generator().manual_seed(generator)
    loader = DataLoader(
        TensorDataset(*digits()), 16, shuffle=True, num_workers=workers, generator=g
    )  # four steps per epoch
    settings = {"epochs": 3, "lr": 0.02, "head_lr": 0.05, "clip": 2.0, "snapshot": folder}

    def progress(_):
        if next(count) == stop:
            raise Interrupted

    done = cn.fit(
        net,
        "digits",
        loader,
        batches(40, 40, 100),
        augment=noisy,
        progress=progress,
        **{"every": 0, **settings, **changes},
    )
    return net, done, next(count)


def facts(done):
    return done.epochs, done.best, done.accuracy


WILD = {"lr": 30.0, "epochs": 4, "patience": 0}  # the loss must rise before the last epoch
CASES = {
    "sgd": {"optimizer": "sgd", "schedule": "constant"},
    "plateau": {"optimizer": "adam", "schedule": "plateau", **WILD},
    "adamw one-cycle": {"optimizer": "adamw", "schedule": "one-cycle"},
    "own": {"optimizer": lambda g: torch.optim.RMSprop(g, lr=0.01, momentum=0.5)},
    "worker": {"workers": 1},
    "early": {"stop_after": 1, "epochs": 6, "lr": 0.3},
    "mixed": {"precision": "mixed"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_an_interrupted_fit_resumes_to_the_same_bits(case, tmp_path):
    whole, done, steps = run(**CASES[case])
    stops = range(steps) if case in ("sgd", "plateau", "adamw one-cycle") else (3, steps - 2)
    losses = [row["loss"] for row in done.epochs]
    assert case != "plateau" or losses[-2] > min(losses[:-2])
    for stop in stops:
        folder = tmp_path / str(stop)
        with pytest.raises(Interrupted):
            run(folder, stop, **CASES[case])
        net, again, left = run(folder, **CASES[case])
        assert left == steps - stop, "no step is done twice, but for the interrupted one"
        assert same(state(net), state(whole)), f"interrupted at step {stop}"
        assert facts(again) == facts(done)


def test_a_loader_with_a_generator_of_its_own_resumes_to_the_same_bits(tmp_path):
    whole, _, _ = run(generator=5)
    with pytest.raises(Interrupted):
        run(tmp_path, 6, generator=5)
    assert same(state(run(tmp_path, generator=5)[0]), state(whole))


def test_many_interruptions_in_a_row_change_nothing(tmp_path):
    whole, done, steps = run()
    for _ in range(steps - 1):
        with pytest.raises(Interrupted):
            run(tmp_path, 1)
    net, again, _ = run(tmp_path)
    assert same(state(net), state(whole))
    assert facts(again) == facts(done)


def test_without_a_due_snapshot_the_epoch_is_done_again_to_the_same_bits(tmp_path):
    whole, _, steps = run()
    with pytest.raises(Interrupted):
        run(tmp_path, 6, every=1e9)
    net, _, left = run(tmp_path, every=1e9)
    assert left == steps - 4, "four steps, the first epoch, were kept"
    assert same(state(net), state(whole))


@pytest.mark.parametrize("forgotten", ["optimizer", "step", "epoch", "best_state", "domain"])
@pytest.mark.slow
def test_a_resume_that_forgets_a_part_differs(forgotten, tmp_path, monkeypatch):
    """Control: the tests above would notice."""
    case = {"optimizer": "adam", "schedule": "one-cycle", "lr": 0.3}
    whole, done, _ = run(**case)
    assert done.best < 2, "the best epoch must lie before the interruption"
    with pytest.raises(Interrupted):
        run(tmp_path, 9, **case)
    right = Loop.load_state_dict

    def forget(self, saved):
        fresh = {
            "step": 0,
            "epoch": 0,
            "best_state": None,
            "optimizer": self.optimizer.state_dict(),
        }
        fresh["domain"] = {k: t.clone() for k, t in self.state_dict()["domain"].items()}
        right(self, saved | {forgotten: fresh[forgotten]})

    monkeypatch.setattr(Loop, "load_state_dict", forget)
    net, again, _ = run(tmp_path, **case)
    assert not same(state(net), state(whole)) or facts(again) != facts(done)


@pytest.mark.parametrize("early", [False, True])
def test_a_finished_stage_is_not_run_again(early, tmp_path):
    case = CASES["early"] if early else {}
    net, done, steps = run(tmp_path, **case)
    assert not early or steps < 24

    class Untouchable:
        def __iter__(self):
            raise AssertionError("the loader was touched")

        __len__ = __iter__

    again = network(dropout=0.3)
    settings = {"epochs": 3, "lr": 0.02, "head_lr": 0.05, "clip": 2.0, **case}
    result = cn.fit(
        again, "digits", Untouchable(), Untouchable(), snapshot=tmp_path, progress=False, **settings
    )
    assert same(state(again), state(net))
    assert facts(result) == facts(done)
    assert not any(m.training for m in again.modules())


# ── other runs' snapshots ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"lr": 0.01}, {"epochs": 4}, {"optimizer": "sgd"}, {"stage": "tune"}]
)
def test_a_fit_with_another_setting_refuses_the_snapshot_by_its_name(change, tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, 2)
    with pytest.raises(CovNormError, match=rf"{RECORD}.* {next(iter(change))}="):
        run(tmp_path, **change)


def test_a_snapshot_of_other_parameters_is_refused_and_the_domain_stays(tmp_path):
    one = {"epochs": 2, "progress": False, "snapshot": tmp_path}
    cn.fit(network(), "digits", batches(), **one)
    net = network()
    before = state(net)
    with pytest.raises(CovNormError, match=str(tmp_path)):
        cn.fit(net, "digits", batches(), parameters=[net.domain("digits").head.weight], **one)
    assert same(state(net), before)


def test_a_snapshot_of_another_domain_is_refused_by_its_file(tmp_path):
    one = {"epochs": 1, "progress": False, "snapshot": tmp_path}
    cn.fit(network(), "digits", batches(), **one)
    with pytest.raises(CovNormError, match=f"{tmp_path}.*domain='digits'"):
        cn.fit(regression()[0], "ink", batches(), **one)
    with pytest.raises(CovNormError, match=str(tmp_path)):
        cn.fit(network(adapter="parallel"), "digits", batches(), **one)


@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        ("lwf", {"strength": 1.0}, {"strength": 5.0}),
        ("covnorm", {"M": "identity"}, {"M": "random"}),
        ("covnorm", {"variance": 0.99}, {"variance": 0.5}),
    ],
)
def test_a_run_with_another_option_refuses_the_snapshot_by_its_name(
    method, first, second, tmp_path
):
    def adapt(options, stop):
        def progress(p):
            if stop and p.stage == ("train" if method == "lwf" else "tune") and p.step == 2:
                raise Interrupted

        cn.adapt(
            cn.MultiDomainNetwork(backbone()),
            *("digits", batches(), None, method),
            **{"epochs": 2, "progress": progress, "snapshot": tmp_path, "every": 0, **options},
        )

    with pytest.raises(Interrupted):
        adapt(first, True)
    with pytest.raises(CovNormError, match=next(iter(second))):
        adapt(second, False)
