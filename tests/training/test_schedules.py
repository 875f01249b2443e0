"""Training settings: checks, schedules, and the exact rates of the literature."""

from __future__ import annotations

import functools
import json
import math
import random

import pytest
import torch
from torch import nn

from torch_covnorm import TRAININGS, CovNormError, Training
from torch_covnorm.training.schedules import Plateau


def rates(training: Training, epochs: list[float]) -> list[float]:
    return [training.lr * training.factor(e) for e in epochs]


def parameters(n: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(n)]


# ── settings ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("setting", "wrong", "nearest"),
    [
        ("optimizer", "admw", "adamw"),
        ("optimizer", "sgdd", "sgd"),
        ("schedule", "onecycle", "one-cycle"),
        ("schedule", "step", "steps"),
        ("schedule", "cosin", "cosine"),
        ("precision", "mixd", "mixed"),
        ("precision", "float23", "float32"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_one(setting, wrong, nearest):
    with pytest.raises(CovNormError, match=f"{setting}='{wrong}': did you mean '{nearest}'"):
        Training(**{setting: wrong})
    with pytest.raises(CovNormError, match=nearest):
        Training().changed({setting: wrong})


def test_a_word_near_to_none_is_refused_with_the_list():
    with pytest.raises(CovNormError, match="choose one of: adam, adamw, sgd"):
        Training(optimizer="ftrl")


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("epoch", "epochs"), ("learning_rate", "head_lr|milestones|choose"), ("weigth_decay", "wei")],
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(wrong, nearest):
    with pytest.raises(CovNormError, match=f"{wrong}= is not a training setting: .*({nearest})"):
        Training().changed({wrong: 1})


@pytest.mark.parametrize(
    "wrong", [{"epochs": -1}, {"lr": 0.0}, {"lr": -1e-3}, {"lr": math.nan}, {"schedule": "steps"}]
)
def test_settings_that_cannot_train_are_refused_by_name(wrong):
    with pytest.raises(CovNormError, match=next(iter(wrong))):
        Training(**wrong)


@pytest.mark.parametrize("setting", ["optimizer", "schedule", "precision"])
@pytest.mark.parametrize("value", [None, 16, ["sgd"]])
def test_what_is_neither_a_word_nor_a_function_is_refused_by_name(setting, value):
    with pytest.raises(CovNormError, match=setting):
        Training(**{setting: value})


def test_changing_makes_a_variant_and_leaves_the_original():
    first = Training(lr=0.1)
    second = first.changed({"lr": 0.2, "betas": (0.5, 0.9)})
    assert (first.lr, second.lr, second.betas) == (0.1, 0.2, (0.5, 0.9))
    assert first.changed({}) == first
    with pytest.raises(AttributeError):
        first.lr = 1.0  # type: ignore[misc]


def halve(epoch: float) -> float:
    return 0.5**epoch


def test_a_record_is_plain_json_and_names_functions():
    training = Training(optimizer=torch.optim.SGD, schedule=halve, milestones=(1, 2))
    record = training.record()
    assert json.loads(json.dumps(record)) == record
    assert record["optimizer"].endswith("SGD")
    assert record["schedule"].endswith("halve")
    assert record["milestones"] == [1, 2]
    assert record.keys() == vars(training).keys()


class Halving:
    def __call__(self, epoch: float) -> float:
        return 0.5**epoch


@pytest.mark.parametrize("function", [functools.partial(halve), Halving()], ids=["partial", "own"])
def test_a_functions_record_is_the_same_in_every_process(function):
    """With a memory address in it, the snapshot of a killed run would not match."""
    assert " at 0x" not in str(Training(schedule=function).record()["schedule"])


# ── factors ───────────────────────────────────────────────────────────────────────────────────


def test_steps_divide_by_ten_at_each_milestone_and_not_before():
    training = Training(10, lr=1.0, schedule="steps", milestones=(3, 7))
    result = rates(training, [0, 2.99, 3, 3.5, 6.99, 7, 9.9])
    assert result == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.01, 0.01], rel=1e-12)


def test_one_cycle_starts_at_a_25th_peaks_at_30_percent_and_ends_at_zero():
    training = Training(10, lr=2.0, schedule="one-cycle")
    assert training.factor(0) == pytest.approx(0.04)
    assert training.factor(3) == pytest.approx(1)
    assert training.factor(10) == pytest.approx(0, abs=1e-15)
    assert training.factor(1.5) == pytest.approx(0.52)  # half way up: the mean of both ends
    assert training.factor(6.5) == pytest.approx(0.5)  # half way down
    rising = [training.factor(3 * i / 50) for i in range(51)]
    falling = [training.factor(3 + 7 * i / 50) for i in range(51)]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


def test_one_cycle_is_torchs_one_cycle():
    """torch counts n - 1 steps and ends at 4e-6: the same curve up to that."""
    n = 1000
    training = Training(1, lr=0.3, schedule="one-cycle")
    optimizer = torch.optim.SGD(parameters(1), lr=0.3)
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=n)
    for step in range(n):
        assert training.factor(step / n) == pytest.approx(torchs.get_last_lr()[0] / 0.3, abs=5e-3)
        optimizer.step()
        if step < n - 1:
            torchs.step()


def test_cosine_falls_from_one_to_zero_as_torchs():
    training = Training(8, lr=1.0, schedule="cosine")
    optimizer = torch.optim.SGD(parameters(1), lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    for epoch in range(9):
        assert training.factor(epoch) == pytest.approx(torchs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        torchs.step()
    assert training.factor(2) == pytest.approx((1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize("schedule", ["constant", "plateau"])
def test_constant_stays_and_plateau_leaves_the_rate_to_the_loss(schedule):
    training = Training(5, schedule=schedule)
    assert [training.factor(e) for e in (0, 0.3, 4.9, 5)] == [1.0] * 4


def test_a_function_gets_fractions_of_epochs_and_its_factor_holds():
    seen = []
    training = Training(4, schedule=lambda e: seen.append(e) or 1 / (1 + e))
    assert [training.factor(e) for e in (0, 1.5, 3)] == [1, 0.4, 0.25]
    assert seen == [0, 1.5, 3]


@pytest.mark.parametrize("schedule", ["one-cycle", "cosine", "constant", "plateau"])
def test_no_epochs_divide_nothing(schedule):
    assert 0 <= Training(0, schedule=schedule).factor(0) <= 1


# ── plateau ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("patience", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["noise", "falling", "nearly flat"])
def test_plateau_divides_where_torchs_does(patience, kind):
    """ReduceLROnPlateau with its own defaults: ÷10, a threshold of 1e-4 of the best."""
    draw = random.Random(f"{patience} {kind}")
    for _ in range(20):
        own = Plateau(patience)
        optimizer = torch.optim.SGD(parameters(1), lr=1.0)
        torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience, eps=0)
        for epoch in range(40):
            loss = {
                "noise": draw.random(),
                "falling": 2 / (1 + epoch) + 0.3 * draw.random(),
                "nearly flat": 1 - 7e-5 * epoch * draw.choice((0, 1)),
            }[kind]
            own.update(loss)
            torchs.step(loss)
            assert own.factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), epoch


def test_plateau_waits_for_its_patience_by_hand():
    plateau = Plateau(2)
    factors = []
    for loss in (1.0, 0.5, 0.6, 0.5, 0.49999, 0.7, 0.7, 0.7, 0.4, 0.5):
        plateau.update(loss)
        factors.append(plateau.factor)
    assert factors == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])


@pytest.mark.parametrize("cut", range(8))
def test_a_plateau_resumes_from_its_state(cut):
    losses = [1.0, 0.9, 0.95, 0.95, 0.95, 0.8, 0.8, 0.8]
    whole, first, second = Plateau(1), Plateau(1), Plateau(1)
    for loss in losses:
        whole.update(loss)
    for loss in losses[:cut]:
        first.update(loss)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in losses[cut:]:
        second.update(loss)
    assert second.state_dict() == whole.state_dict()
    assert whole.factor < 1


# ── the literature ────────────────────────────────────────────────────────────────────────────


def test_decathlon_is_residual_adapters_training():
    """Rebuffi 2017: SGD at 0.1 with momentum, 120 epochs, ÷10 after 80 and 100."""
    t = TRAININGS["decathlon"]
    assert (t.optimizer, t.momentum, t.epochs) == ("sgd", 0.9, 120)
    assert rates(t, [0, 79, 80, 99, 100, 119]) == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])


def test_piggyback_is_mallyas_training():
    """Adam at 1e-4, no decay (it would pull masks to the threshold), 30 epochs, ÷10 at 15."""
    t = TRAININGS["piggyback"]
    assert (t.optimizer, t.weight_decay, t.epochs) == ("adam", 0, 30)
    assert rates(t, [0, 14, 15, 29]) == pytest.approx([1e-4, 1e-4, 1e-5, 1e-5])


def test_official_code_is_the_authors_program():
    """Adam (0.9, 0.99), decay 5e-4, 40 epochs from 1e-3, ÷10 every 5."""
    t = TRAININGS["official-code"]
    assert (t.optimizer, t.betas, t.weight_decay, t.epochs) == ("adam", (0.9, 0.99), 5e-4, 40)
    expected = [1e-3 * 0.1 ** (epoch // 5) for epoch in range(40)]
    assert rates(t, list(range(40))) == pytest.approx(expected)


def test_paper_is_1e_3_on_a_plateau():
    t = TRAININGS["paper"]
    assert (t.lr, t.schedule) == (1e-3, "plateau")
    assert t.factor(39) == 1


# ── optimisers ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.8}),
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.95)}),
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    ],
)
def test_an_optimiser_is_torchs_with_the_settings_in_every_group(name, kind, own):
    body, head = parameters(2), parameters(1)
    training = Training(optimizer=name, lr=0.25, weight_decay=0.125, head_lr=0.5, **own)
    made = training.make_optimizer(body, head)
    assert type(made) is kind
    assert [group["params"] for group in made.param_groups] == [body, head]
    assert [group["lr"] for group in made.param_groups] == [0.25, 0.5]
    for group in made.param_groups:
        assert group["weight_decay"] == 0.125
        assert all(group[key] == value for key, value in own.items())


def test_without_head_lr_the_head_has_the_same_rate_and_no_group_is_empty():
    body, head = parameters(2), parameters(1)
    training = Training(lr=0.25)
    assert [g["lr"] for g in training.make_optimizer(body, head).param_groups] == [0.25, 0.25]
    assert [g["params"] for g in training.make_optimizer(body).param_groups] == [body]
    assert [g["params"] for g in training.make_optimizer([], head).param_groups] == [head]
    assert [g["params"] for g in training.make_optimizer(iter(body)).param_groups] == [body]


def test_a_function_makes_the_optimiser_from_the_groups():
    body, head = parameters(2), parameters(1)
    made = Training(
        optimizer=lambda groups: torch.optim.RMSprop(groups, lr=0.5), head_lr=0.25
    ).make_optimizer(body, head)
    assert type(made) is torch.optim.RMSprop
    assert [g["lr"] for g in made.param_groups] == [0.5, 0.25]


def test_a_functions_own_rate_holds_for_the_head_where_head_lr_is_not_given():
    training = Training(optimizer=functools.partial(torch.optim.SGD, lr=0.5))
    made = training.make_optimizer(parameters(2), parameters(1))
    assert [g["lr"] for g in made.param_groups] == [0.5, 0.5]
