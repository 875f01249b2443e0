"""`fit` equals a hand-written loop, and changes nothing but the domain."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from small_digits import batches, digits, network, noisy, regression, same, state
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torch_covnorm as cn
from torch_covnorm import CovNormError

CONSTANT = {"schedule": "constant", "progress": False}


def fitted(dropout: float = 0.0, train=None, **arguments) -> dict[str, Tensor]:
    net, train = network(dropout), batches() if train is None else train
    cn.fit(net, "digits", train, **({"epochs": 2, "progress": False} | arguments))
    return state(net)


# ── the loop ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.slow
def test_fit_is_a_hand_written_loop_to_the_bit(optimizer, clip):
    net, plain = network(), network()
    cn.fit(net, "digits", batches(), epochs=3, lr=0.01, optimizer=optimizer, clip=clip, **CONSTANT)
    own = list(plain.parameters_of("digits"))
    makers = {
        "sgd": lambda: torch.optim.SGD(own, lr=0.01, momentum=0.9, weight_decay=0.01),
        "adam": lambda: torch.optim.Adam(own, lr=0.01, weight_decay=0.01),
        "adamw": lambda: torch.optim.AdamW(own, lr=0.01, weight_decay=0.01),
    }
    opt, clipped = makers[optimizer](), 0
    plain.train()
    for _ in range(3):
        for images, labels in batches():
            opt.zero_grad()
            F.cross_entropy(plain(images, domain="digits"), labels).backward()
            if clip is not None:
                clipped += bool(nn.utils.clip_grad_norm_(own, clip) > clip)
            opt.step()
    assert same(state(net), state(plain))
    assert clip is None or clipped, "the clip must have done something"
    assert not same(state(net), state(network())), "control: training changes the domain"


def watched(seen: list):
    """Return a function that makes an SGD which records the rates of each step."""

    def make(groups):
        optimizer = torch.optim.SGD(groups, lr=0.1)
        groups = optimizer.param_groups
        optimizer.register_step_pre_hook(lambda *_: seen.append([g["lr"] for g in groups]))
        return optimizer

    return make


def test_the_schedule_sets_the_rate_of_every_step_and_group():
    seen: list = []
    fitted(optimizer=watched(seen), head_lr=0.4, schedule=lambda epoch: 1 - epoch / 2)
    expected = [1 - step / 6 for step in range(6)]  # two epochs of three steps
    assert [body for body, _ in seen] == pytest.approx([0.1 * f for f in expected])
    assert [head for _, head in seen] == pytest.approx([0.4 * f for f in expected])


def test_plateau_divides_the_rate_when_the_training_loss_stays():
    """The validation loss does not matter: here it keeps falling."""
    seen: list = []
    plateau = {"optimizer": watched(seen), "schedule": "plateau", "patience": 1, "epochs": 7}

    def flat(out, _):
        return 0 * out.sum() + (1 if out.requires_grad else 0.5 ** len(seen))

    fitted(train=batches(20), val=batches(20), criterion=flat, **plateau)
    assert [body for body, _ in seen] == pytest.approx([0.1] * 3 + [0.01] * 2 + [0.001] * 2)


def test_penalty_is_added_to_the_loss_after_the_forward_pass():
    def penalised(net):
        return lambda _: 0.3 * sum(p.square().sum() for p in net.parameters_of("digits"))

    net, plain = network(), network()
    settings = {"epochs": 1, "lr": 0.01, "optimizer": "sgd", **CONSTANT}
    cn.fit(net, "digits", batches(), penalty=penalised(net), **settings)
    by_hand = penalised(plain)

    def criterion(out, labels):
        return F.cross_entropy(out, labels) + by_hand(None)

    cn.fit(plain, "digits", batches(), criterion=criterion, **settings)
    assert same(state(net), state(plain))
    assert not same(state(net), fitted(**settings))


def test_parameters_trains_only_these():
    net = network()
    before, flags = state(net), [p.requires_grad for p in net.domain("digits").parameters()]
    head = list(net.domain("digits").head.parameters())
    cn.fit(net, "digits", batches(), epochs=1, parameters=head, progress=False)
    after, names = state(net), dict(net.domain("digits").named_parameters())
    changed = {k for k in names if not torch.equal(before[k], after[k])}
    assert changed == {k for k in names if k.startswith("head")}
    assert [p.requires_grad for p in net.domain("digits").parameters()] == flags
    assert all(p.grad is None for p in net.parameters())


def test_a_custom_criterion_for_regression_has_no_accuracy():
    net, data = regression()
    done = cn.fit(net, "ink", data, data, epochs=8, lr=0.02, criterion=F.mse_loss, progress=False)
    assert {done.accuracy, *(row["accuracy"] for row in done.epochs)} == {None}
    losses = [row["val_loss"] for row in done.epochs]
    assert done.best == losses.index(min(losses))


def test_mixed_precision_learns_on_this_machine():
    net, settings = network(), {"epochs": 6, "lr": 0.02, "clip": 5.0, "progress": False}
    done = cn.fit(net, "digits", batches(), precision="mixed", **settings)
    assert done.epochs[-1]["loss"] < done.epochs[0]["loss"]
    assert all(p.dtype == torch.float32 for p in net.domain("digits").parameters())


# ── what stays ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("adapter", zoo.KINDS)
def test_only_the_domain_changes_the_backbone_and_others_keep_every_bit(adapter):
    net = network(dropout=0.2, adapter=adapter)
    bits, other, own = zoo.backbone_bits(net), state(net, "other"), state(net)
    cn.fit(net, "digits", batches(), batches(), epochs=1, lr=0.05, progress=False)
    assert zoo.backbone_bits(net) == bits
    assert same(state(net, "other"), other)
    assert not same(state(net), own)
    assert not any(m.training for m in net.modules()), "left in eval mode"


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_random_numbers_are_untouched(fails):
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    net = network(dropout=0.5)
    torch.set_rng_state(before[0])
    loader = DataLoader(TensorDataset(*digits()), 20, shuffle=True)

    def drawing(x):
        if fails:
            raise RuntimeError("no augmentation today")
        return x + torch.randn_like(x) * random.random() * np.random.rand()

    try:
        cn.fit(net, "digits", loader, loader, epochs=1, augment=drawing, progress=False)
    except RuntimeError:
        assert fails
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before():
    def run(seed, dropout, shuffle, noise):
        torch.manual_seed(draw.randrange(2**31)), random.seed(draw.random())
        return fitted(
            dropout,
            DataLoader(TensorDataset(*digits()), 20, shuffle=shuffle),
            augment=noisy if noise else None,
            seed=seed,
        )

    draw = random.Random(0)
    for source in ((0.5, False, False), (0.0, True, False), (0.0, False, True)):
        assert same(run(3, *source), run(3, *source))
        assert not same(run(3, *source), run(4, *source))
    assert same(run(3, 0.0, False, False), run(4, 0.0, False, False)), "nothing random, no seed"


def test_every_epoch_and_step_draws_new_numbers():
    drawn, order = set(), set()

    def watch(x):
        drawn.add(torch.rand(1).item())
        order.add(tuple(x.sum((1, 2, 3)).tolist()))
        return x

    loader = DataLoader(TensorDataset(*digits()), 20, shuffle=True)
    cn.fit(network(), "digits", loader, epochs=3, augment=watch, progress=False)
    assert len(drawn) == len(order) == 9


# ── validation ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("good", [2, 4])
def test_the_best_validation_epochs_state_is_kept(good):
    """The rate explodes after `good` epochs: the domain has the state of the best epoch."""

    def run(epochs, val=None):
        net = network()
        settings = {"epochs": epochs, "lr": 0.1, "optimizer": "sgd", "clip": 1.0}
        explode = {"schedule": lambda e: 1.0 if e < good else 1e3, "progress": False}
        return net, cn.fit(net, "digits", batches(), val, **settings, **explode)

    net, done = run(good + 2, batches(60, 60))
    rows = done.epochs
    merit = [(row["accuracy"], -row["val_loss"]) for row in rows]
    assert done.best == merit.index(max(merit)) < good
    assert len(rows) == good + 2
    assert rows[-1]["val_loss"] > 10 * rows[0]["val_loss"]
    assert same(state(net), state(run(done.best + 1)[0]))
    assert done.accuracy == rows[done.best]["accuracy"]
    assert cn.evaluate(net, "digits", batches(60, 60)).accuracy == done.accuracy
    assert not same(state(net), state(run(good + 2)[0])), "control: no validation, the last state"


def scripted_fit(values, **arguments):
    """The validation losses are these values in order."""
    (net, data), left = regression(20), iter(values)

    def criterion(out, labels):
        return F.mse_loss(out, labels) if out.requires_grad else torch.tensor(next(left))

    settings = {"epochs": len(values), "progress": False} | arguments
    return cn.fit(net, "ink", data, data, criterion=criterion, **settings)


@pytest.mark.parametrize(("stop_after", "ran"), [(None, 7), (0, 1), (1, 3), (2, 4), (3, 7)])
def test_stop_after_counts_the_epochs_without_improvement(stop_after, ran):
    done = scripted_fit([3, 2, 2.5, 2.5, 1, 2, 2], stop_after=stop_after)
    assert len(done.epochs) == ran
    assert done.best == {7: 4, 1: 0}.get(ran, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kept", [False, True])
def test_an_epoch_whose_validation_is_not_finite_is_never_the_best(bad, kept, tmp_path):
    done = scripted_fit([bad, 2.0, bad, 3.0], snapshot=tmp_path if kept else None, every=0)
    assert done.best == 1


def test_validation_data_never_train():
    net, seen, (x, y) = network(dropout=0.5), [], digits(20, 100)

    class Val(list):
        def __iter__(self):
            seen.append(net.domain("digits").training)
            return super().__iter__()

    leaf, one = x.clone().requires_grad_(True), {"epochs": 2, "progress": False}
    cn.fit(net, "digits", batches(), Val([(leaf, y)]), **one)
    assert leaf.grad is None
    assert seen == [False, False], "in eval mode, once per epoch"
    last = cn.fit(network(dropout=0.5), "digits", batches(), [(x, y)], **one)
    plain = cn.fit(network(dropout=0.5), "digits", batches(), **one)
    assert [r["loss"] for r in last.epochs] == [r["loss"] for r in plain.epochs]


def test_augment_is_for_training_batches_only():
    seen: list = []
    fitted(val=batches(20, 10, 200), augment=lambda x: seen.append(len(x)) or x)
    assert seen == [20] * 6


@pytest.mark.parametrize("training", [False, True])
def test_evaluate_is_a_brute_force_loop_and_keeps_the_mode(training):
    net = network(dropout=0.5).train(training)
    zoo.shake_(net.domain("digits"))
    before, modes = state(net), [m.training for m in net.modules()]
    result = cn.evaluate(net, "digits", batches(50, 20))  # the last batch is smaller
    assert [m.training for m in net.modules()] == modes
    assert same(state(net), before)
    x, y = digits(50)
    net.eval()
    with torch.no_grad():
        out = torch.cat([net(image[None], domain="digits") for image in x])
    assert result.n == 50
    assert result.loss == pytest.approx(float(F.cross_entropy(out, y)), rel=1e-5)
    assert result.accuracy == pytest.approx(100 * float((out.argmax(1) == y).float().mean()))
    with pytest.raises(CovNormError, match="digits"):
        cn.evaluate(net, "digits", [])


# ── loaders ───────────────────────────────────────────────────────────────────────────────────


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*digits(), strict=True))


class NoLength:
    def __iter__(self):
        return iter(batches())


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(TensorDataset(*digits()), 20),
        lambda: DataLoader(TensorDataset(*digits()), 20, num_workers=1),
        lambda: tuple(batches()),
        NoLength,
        lambda: DataLoader(Stream(), 20),
    ],
    ids=["DataLoader", "worker", "tuple", "no length", "stream"],
)
def test_the_same_batches_train_the_same_whatever_holds_them(loader):
    assert same(fitted(train=loader(), **CONSTANT), fitted(**CONSTANT))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_loader_draws_the_same_again(workers):
    def loader():
        return DataLoader(TensorDataset(*digits()), 20, shuffle=True, num_workers=workers)

    assert same(fitted(train=loader()), fitted(train=loader()))
    assert not same(fitted(train=loader()), fitted())


def test_a_generator_that_would_be_used_up_is_a_clear_error():
    with pytest.raises(CovNormError, match="can be iterated only once"):
        cn.fit(network(), "digits", iter(batches()), epochs=2, progress=False)
    with pytest.raises(CovNormError, match="epoch 1"):
        cn.fit(network(), "digits", [], epochs=1, progress=False)


def test_a_batch_of_one_image_is_left_out():
    x, y = digits(41)
    odd = list(zip(x.split(20), y.split(20), strict=True))
    assert len(odd[-1][0]) == 1
    assert same(fitted(train=odd, **CONSTANT), fitted(train=batches(40), **CONSTANT))
    with pytest.raises(CovNormError, match="two or more images"):
        fitted(train=[(x[:1], y[:1])])


# ── errors and progress ───────────────────────────────────────────────────────────────────────


def test_a_loss_that_is_not_finite_names_epoch_and_step():
    count = iter(range(99))

    def criterion(out, labels):
        return F.cross_entropy(out, labels) * (math.nan if next(count) == 4 else 1)

    net = network()
    with pytest.raises(CovNormError, match=r"'digits': the loss is nan at epoch 2, step 2"):
        cn.fit(net, "digits", batches(), epochs=3, criterion=criterion, progress=False)
    assert not any(m.training for m in net.modules())
    assert all(t.isfinite().all() for t in net.domain("digits").parameters())


def test_nothing_to_train_unknown_names_and_settings_are_clear_errors():
    net = network()
    for wrong, text in (({"parameters": []}, "nothing to train"), ({"epoch": 3}, "epochs")):
        with pytest.raises(CovNormError, match=text):
            cn.fit(net, "digits", batches(), progress=False, **wrong)
    with pytest.raises(CovNormError, match="did you mean 'digits'"):
        cn.fit(net, "digit", batches(), progress=False)
    with pytest.raises(CovNormError, match="did you mean 'decathlon'"):
        cn.fit(net, "digits", batches(), training="decatlon", progress=False)


def test_an_error_before_the_first_step_leaves_what_trains_as_it_was(tmp_path):
    net, one = network(), {"epochs": 1, "progress": False, "snapshot": tmp_path}
    cn.fit(net, "digits", batches(), lr=1e-3, **one)
    head = list(net.domain("digits").head.parameters())
    flags = [p.requires_grad for p in net.domain("digits").parameters()]
    with pytest.raises(CovNormError, match="lr"):
        cn.fit(net, "digits", batches(), parameters=head, lr=2e-3, **one)
    assert [p.requires_grad for p in net.domain("digits").parameters()] == flags


def test_progress_reports_stage_epoch_step_loss_and_the_last_validation():
    seen: list[cn.Progress] = []
    done = cn.fit(
        network(), "digits", batches(), batches(), epochs=2, progress=seen.append, stage="tune"
    )
    assert [(p.epoch, p.step) for p in seen] == [(e, s) for e in (0, 1) for s in (1, 2, 3)]
    assert {(p.stage, p.epochs, p.steps) for p in seen} == {("tune", 2, 3)}
    assert [p.accuracy for p in seen] == [None] * 3 + [done.epochs[0]["accuracy"]] * 3
    assert [seen[2].loss, seen[5].loss] == [row["loss"] for row in done.epochs]
    assert all(p.images_per_second > 0 for p in seen)
    unsized: list[cn.Progress] = []
    cn.fit(network(), "digits", NoLength(), epochs=1, progress=unsized.append)
    assert [p.steps for p in unsized] == [None] * 3


def test_progress_bars_go_to_stderr_and_change_no_bit(capsys):
    assert same(fitted(progress=True), fitted(progress=False))
    assert "train" in capsys.readouterr().err
    fitted(progress=False)
    assert capsys.readouterr() == ("", "")
