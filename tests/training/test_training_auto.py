"""What `Training("auto")` chooses, each choice by itself."""

from __future__ import annotations

import math

import pytest
import small_digits
import torch
import torch.nn.functional as F
import zoo
from sklearn.linear_model import LogisticRegression

import torch_covnorm as cn
from torch_covnorm.training.auto import (
    RATES,
    USUAL,
    calibrate_,
    clearly_lower,
    clearly_worse,
    epochs_for,
    keeps_class,
    picked_rate,
    race,
    runs_for,
    weights_for,
)
from torch_covnorm.training.evaluation import Evaluation
from torch_covnorm.training.probe import DECAYS, fit_head, right_about

pytestmark = pytest.mark.usefixtures("one_thread")

# ── epochs and class weights ──────────────────────────────────────────────────────────────────


def test_fewer_images_are_seen_more_often():
    assert [epochs_for(n) for n in (0, 1, 100, 400, 900, 2500, 10**6)] == [30, 30, 30, 15, 10, 6, 6]
    assert all(epochs_for(n) >= epochs_for(n + 1) for n in range(3000))


def test_few_images_are_trained_on_three_times():
    assert [runs_for(n) for n in (0, 100, 1999, 2000, 10**6)] == [3, 3, 3, 1, 1]


def test_class_weights_have_their_closed_form():
    """1/√100 and 1/√25 are 0.1 and 0.2; the 125 images have 10 + 5 of it in all."""
    weights = weights_for(torch.tensor([100, 25]))
    torch.testing.assert_close(weights, torch.tensor([0.1, 0.2]) * 125 / 15)
    counts = torch.tensor([200, 7, 31])
    assert float((weights_for(counts) * counts).sum()) == pytest.approx(238)


@pytest.mark.parametrize(
    ("counts", "weighted"),
    [([5, 5], False), ([30, 10], False), ([31, 10], True), ([31, 0, 31], False), ([9], False)],
)
def test_only_classes_unbalanced_by_more_than_three_are_weighted(counts, weighted):
    assert (weights_for(torch.tensor(counts)) is not None) == weighted


# ── paired comparisons ────────────────────────────────────────────────────────────────────────


def answers(lost, gained, both=50):
    """Which images a and b are right about: b alone about `lost`, a alone about `gained`."""
    a = [False] * lost + [True] * gained + [True] * both
    b = [True] * lost + [False] * gained + [True] * both
    return torch.tensor(a), torch.tensor(b)


@pytest.mark.parametrize(
    ("lost", "gained", "worse"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (0, 9, False), (5, 5, False), (8, 3, True)],
)
def test_worse_is_by_more_than_a_standard_error_of_the_paired_difference(lost, gained, worse):
    assert worse == (lost - gained > math.sqrt(lost + gained))  # the table is right
    a, b = answers(lost, gained)
    assert clearly_worse(a, b) == worse
    assert keeps_class(b, a) != worse


def test_losses_are_lower_by_more_than_a_standard_error_or_not():
    torch.manual_seed(0)
    b = torch.rand(100).double()
    assert clearly_lower(b - 0.01, b)
    assert not clearly_lower(b, b)
    assert not clearly_lower(b + 0.01, b)
    noise = torch.randn(100).double()
    assert not clearly_lower(b - 0.01 - noise + noise.mean(), b)
    assert not clearly_lower(b[:1] - 1, b[:1]), "one image has no error to compare with"


# ── calibrated norms ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["convnet", "mlp"])
@torch.no_grad()
def test_the_statistics_of_b1_are_those_of_all_images_in_the_bare_network(name):
    net = zoo.network(name, kinds=("residual",))
    for p in net.backbone.parameters():
        if p.ndim == 1:
            p.add_(30)  # a mean far from 0, which sums of squares in float32 would not survive
    images = zoo.ZOO[name][1](23)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    calibrate_(net, "residual", [(part, None) for part in images.split([7, 1, 15])])
    seen = {}
    for site in net.sites:
        layer = net.backbone.get_submodule(site)
        hook = layer.register_forward_hook(lambda _, __, z, s=site: seen.update({s: z}))
        net.backbone(images)
        hook.remove()
    for site, adapter in net.domain("residual").adapters.items():
        rows = seen[site].movedim(1, -1).flatten(0, -2).double()
        mean = rows.mean(0)
        var = (rows - mean).square().mean(0)  # two passes
        torch.testing.assert_close(adapter.B1.running_mean.double(), mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(adapter.B1.running_var.double(), var, rtol=1e-4, atol=1e-5)
        half = rows[: len(rows) // 2]  # a control: those of half of the images are others
        assert not torch.allclose(half.mean(0), mean, rtol=1e-4, atol=1e-4)
    changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all("B1.running" in k or "B1/running" in k for k in changed)


# ── the linear head ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("classes", [3, 6])
def test_the_linear_head_is_the_optimum_that_scikit_learn_finds(classes):
    torch.manual_seed(1)
    x = torch.randn(240, 6) * torch.logspace(-0.2, 0.2, 6) + 3
    y = ((x - x.mean(0)) / x.std(0) @ torch.randn(6, classes) + torch.randn(240, classes)).argmax(1)
    head = fit_head(x, y, classes)
    assert head.decay in DECAYS
    mean, std = x.mean(0), x.var(0, correction=0).mean().sqrt()  # one number for all features
    z = ((x - mean) / std).double()

    def objective(weight, bias, decay):
        return float(F.cross_entropy(z @ weight.T + bias, y) + decay * weight.square().sum())

    weight = (head.weight * std).double()  # of the scaled features
    bias = (head.bias + head.weight @ mean).double()
    ours, values = objective(weight, bias, head.decay), {}
    for decay in DECAYS:
        # n·C times (mean loss + |w|² / 2nC)
        solver = LogisticRegression(C=1 / (2 * len(y) * decay), tol=1e-8, max_iter=2000)
        solver.fit(z.numpy(), y.numpy())
        w, b = torch.tensor(solver.coef_), torch.tensor(solver.intercept_)
        values[decay] = objective(w, b, head.decay)
        if decay == head.decay:
            torch.testing.assert_close(weight - weight.mean(0), w, atol=5e-3, rtol=1e-2)
    assert ours == pytest.approx(values[head.decay], rel=1e-4)
    others = [v for decay, v in values.items() if decay != head.decay]
    assert min(others) > ours, "a control: another decay has another optimum"
    accuracy = float((head(x).argmax(1) == y).double().mean())
    assert accuracy > 1.3 / classes


def test_the_decay_with_the_best_cross_validated_accuracy_is_used():
    """Each image is judged by a head that was fitted to the other four fifths."""
    torch.manual_seed(0)
    x = torch.randn(200, 40)
    y = (x @ torch.randn(40, 4) + 2 * torch.randn(200, 4)).argmax(1)
    right = {d: int(right_about(x, x, y, 4, d)[0].sum()) for d in DECAYS}
    assert len(set(right.values())) > 1, "or the choice shows nothing"
    best = fit_head(x, y, 4).decay
    assert right[best] >= max(right.values()) - 2  # the folds are scaled by their own deviation
    assert right[best] > min(right.values())


# ── the race ──────────────────────────────────────────────────────────────────────────────────


def racing(epochs=16, **settings):
    """The rate, how it was found, and all steps, of a network with a fresh head."""
    net, steps = small_digits.network(), []
    domain, before = net.domain("digits"), small_digits.state(net)
    train, val = small_digits.batches(120, 20), small_digits.batches(100, 50, start=200)
    training = cn.Training("auto").changed({"epochs": epochs, "runs": 1, "weight_decay": 0.0})
    rate, found = race(net, "digits", train, val, training, progress=steps.append, **settings)
    assert net.domain("digits") is domain
    assert small_digits.same(small_digits.state(net), before), "the race leaves no trace"
    assert {p.stage for p in steps} <= {"race"}
    return rate, found, len(steps), epochs * len(train)


def test_a_race_leaves_the_domain_and_takes_at_most_a_third_of_the_steps():
    rate, found, taken, steps = racing()
    assert 0 < taken <= steps / 3
    assert rate == found["rate"]
    assert len(found["validation loss"]) == len(RATES)


@pytest.mark.parametrize("epochs", [12, 13, 16, 25, 30])
def test_a_race_of_any_length_is_within_a_third(epochs):
    _, _, taken, steps = racing(epochs)
    assert 0 < taken <= steps / 3


def test_another_rate_is_picked_where_it_is_clearly_better():
    """A fresh head learns next to nothing at the usual rate in so few steps."""
    rate, found, *_ = racing()
    assert rate == max(RATES) > USUAL
    losses = found["validation loss"]
    assert losses[f"{rate:g}"] < losses[f"{USUAL:g}"]


def test_on_a_tie_it_is_the_usual_rate():
    """Without a gradient, and without weight decay, every rate gives the same."""
    rate, found, *_ = racing(criterion=lambda outputs, _: 0 * outputs.sum())
    assert len(set(found["validation loss"].values())) == 1
    assert rate == USUAL


@pytest.mark.parametrize(
    ("means", "picked"),
    [
        ((9.0, 5.4, 1.0, 0.9), 2e-3),  # lower rates are ahead, as always after a few steps
        ((9.0, 5.6, 1.0, 0.9), 6e-4),  # more than 2 ln 10 = 4.6 above the lowest
        ((9.0, 5.6, 5.6, 0.9), 2e-4),
        ((1.3, 1.2, 1.0, 0.9), 2e-3),
        ((1.1, 1.2, 1.0, 0.9), 6e-3),  # a higher rate is clearly better than the usual one
        ((1.1, 5.6, 1.0, 0.9), 6e-4),  # but the usual one is too high
    ],
)
def test_a_rate_that_is_too_high_is_lowered_and_a_low_one_needs_no_lead(means, picked):
    noise = torch.linspace(-0.1, 0.1, 100)
    found = {rate: mean + noise for rate, mean in zip(RATES, means, strict=True)}
    assert picked_rate(found, 10) == picked
    assert picked_rate(found, 10, runs=3) == min(picked, USUAL)
    few = {rate: losses[:99] for rate, losses in found.items()}
    assert picked_rate(few, 10) == min(picked, USUAL)


def test_the_tolerance_grows_with_the_classes():
    losses = zip(RATES, (9.0, 6.0, 1.0, 0.9), strict=True)
    found = {rate: torch.full((9,), loss) for rate, loss in losses}
    assert picked_rate(found, 10) == 6e-4
    assert picked_rate(found, 1000) == 2e-3


def test_too_few_steps_are_no_race():
    rate, found, taken, _ = racing(epochs=2)
    assert (rate, taken) == (USUAL, 0)
    assert "too few" in found["why"]


# ── which epoch is kept, and divergence ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("accuracies", "keep", "epoch"),
    [
        ([50.0, 60.0, 57.0], "best", 1),
        ([50.0, 60.0, 57.0], "settled", 2),
        ([50.0, 60.0, 54.0], "settled", 1),
        ([50.0, 60.0, 61.0], "settled", 2),
    ],
)
def test_the_last_epoch_is_kept_unless_the_best_is_clearly_better(
    accuracies, keep, epoch, monkeypatch
):
    """60 % of 96 images has a standard error of 5 points."""
    said, states = iter(accuracies), []
    net, data = small_digits.network(), small_digits.batches()

    def evaluated(*_):
        states.append(small_digits.state(net))
        return Evaluation(1.0, next(said), 96)

    monkeypatch.setattr("torch_covnorm.training.fit.evaluate", evaluated)
    done = cn.fit(net, "digits", data, data, epochs=len(accuracies), keep=keep)
    assert (done.best, done.accuracy) == (epoch, accuracies[epoch])
    found = [small_digits.same(small_digits.state(net), s) for s in states]
    assert found == [i == epoch for i in range(len(accuracies))]


@pytest.mark.parametrize("lr", [100.0, 1e4])
def test_training_that_diverges_goes_on_with_a_third_of_the_rate(lr):
    net, data = small_digits.network(), small_digits.batches(200, 20)
    done = cn.fit(net, "digits", data, epochs=6, lr=lr, optimizer="sgd", recover=True)
    assert done.slowed > 0
    assert all(v.isfinite().all() for v in small_digits.state(net).values())
    calm = small_digits.network()
    assert cn.fit(calm, "digits", data, epochs=6, lr=3e-3, recover=True).slowed == 0


def test_without_recovery_a_loss_that_is_not_finite_is_an_error():
    net, data = small_digits.network(), small_digits.batches(200, 20)
    with pytest.raises(cn.CovNormError, match="Lower lr="):
        cn.fit(net, "digits", data, epochs=6, lr=1e30, optimizer="sgd")


def test_fit_takes_numbers_only():
    net, data = small_digits.network(), small_digits.batches()
    with pytest.raises(cn.CovNormError, match=r"fit takes numbers. cn\.adapt chooses"):
        cn.fit(net, "digits", data, training="auto")
    with pytest.raises(cn.CovNormError, match=r"runs=2: fit trains once. cn\.adapt averages"):
        cn.fit(net, "digits", data, epochs=1, runs=2)


@pytest.mark.parametrize("runs", [0, -1, 1.5, "two", True])
def test_runs_are_a_number_from_one_on(runs):
    with pytest.raises(cn.CovNormError, match=f"runs={runs!r}"):
        cn.Training(runs=runs)


def test_given_settings_stay_and_the_rest_is_auto():
    auto, given = cn.Training("auto"), cn.Training("auto", lr=1e-3, head="fresh")
    assert (auto.lr, auto.head, auto.keep, auto.recover) == ("auto", "probe", "settled", True)
    assert (auto.runs, cn.Training("auto", runs=2).runs, cn.Training().runs) == ("auto", 2, 1)
    assert (given.lr, given.head, given.keep) == (1e-3, "fresh", "settled")
    fixed = cn.Training()
    assert (fixed.lr, fixed.head, fixed.keep, fixed.recover) == (3e-3, "fresh", "best", False)
    assert auto.changed({"epochs": 4}).lr == "auto"
