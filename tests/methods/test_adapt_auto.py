"""`adapt` by default: it finds its settings, and is never clearly worse than a linear head."""

from __future__ import annotations

import contextlib

import pytest
import small_digits
import torch
import wide_digits
from torch import Tensor

import torch_covnorm as cn
from torch_covnorm.methods import run
from torch_covnorm.methods.run import NEXT_RUN
from torch_covnorm.training.auto import RATES, clearly_worse
from torch_covnorm.training.evaluation import correct
from torch_covnorm.training.probe import features, fit_head

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN, VAL = small_digits.batches(200, 20), small_digits.batches(200, 50, start=400)


def network():
    return cn.MultiDomainNetwork(wide_digits.backbone())


def adapted(train=TRAIN, val=VAL, net=None, method="ra", **settings):
    """A network with a domain "d" adapted by default, and the result."""
    net = net or network()
    settings = {"classes": 10, "progress": False, **settings}
    return net, cn.adapt(net, "d", train, val, method, **settings)


def linear(train=TRAIN, val=VAL) -> tuple[Tensor, Tensor]:
    """The logits of the best linear head on the validation images, and where it is right."""
    net = network()
    x, y = features(net, train)
    head = fit_head(x, y, 10)
    images, labels = features(net, val)
    logits = head(images)
    return logits, logits.argmax(1) == labels


def files(net, folder):
    """The contents of the files of the domain."""
    return {f.name: f.read_bytes() for f in net.save_domain("d", folder).iterdir()}


# ── what is chosen, and what is given ─────────────────────────────────────────────────────────


@pytest.mark.slow
def test_every_choice_is_in_the_result():
    _, found = adapted()
    assert set(found.choices) >= {"epochs", "class weights", "head", "augment", "lr"}
    assert (found.choices["runs"], found.choices["epochs"]) == (3, 11)  # half of 300 / √200
    assert found.choices["lr"]["rate"] in RATES
    assert found.choices["class weights"] is None
    assert found.record()["choices"] == found.choices
    assert found.stages["linear"] == 100 * float(linear()[1].double().mean())


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"epochs": 2}, "epochs"),
        ({"lr": 2e-3}, "lr"),
        ({"augment": lambda x: x}, "augment"),
        ({"augment": "none"}, "augment"),
        ({"training": cn.Training("auto", augment="none")}, "augment"),
        ({"class_weights": "none"}, "class weights"),
        ({"head": "fresh"}, "head"),
    ],
    ids=["epochs", "lr", "augment", "no augment", "in a Training", "class weights", "head"],
)
def test_a_setting_that_is_given_is_not_chosen(given, key):
    unbalanced = small_digits.batches(60, 20)
    trained = []
    settings = {"epochs": 1, "progress": trained.append, **given}
    _, found = adapted(unbalanced, **settings)
    assert key not in found.choices
    steps = [p for p in trained if p.stage == "train"]
    assert len(steps) == settings["epochs"] * len(unbalanced)
    others = {"lr", "augment", "class weights", "head"} - {key}
    assert others <= set(found.choices), "a control: the rest is chosen"


def test_the_given_rate_is_the_one_that_trains():
    runs = [adapted(TRAIN[:3], epochs=1, lr=lr, head="fresh") for lr in (1e-3, 1e-3, 2e-3)]
    assert not any("lr" in found.choices for _, found in runs)
    states = [small_digits.state(net, "d") for net, _ in runs]
    assert small_digits.same(states[0], states[1])
    assert not small_digits.same(states[0], states[2])


@pytest.mark.parametrize(("rare", "weighted"), [(5, True), (20, False)])
def test_rare_classes_weigh_more_only_if_unbalanced_by_more_than_three(rare, weighted):
    x, y = small_digits.digits(400)
    kept = torch.cat([(y == c).nonzero()[: rare if c == 3 else 20, 0] for c in range(10)])
    kept = kept[torch.randperm(len(kept))]
    train = list(zip(x[kept].split(20), y[kept].split(20), strict=True))
    _, found = adapted(train, epochs=1, lr=1e-3)
    weights = found.choices["class weights"]
    assert (weights is not None) == weighted
    if weighted:
        assert weights.index(max(weights)) == 3
        assert max(weights) / min(weights) == pytest.approx((20 / rare) ** 0.5, rel=1e-2)


def test_digits_are_not_mirrored_and_symmetric_images_are():
    def symmetric(batches):
        return [(x + x.flip(-1), y) for x, y in batches]

    settings = {"epochs": 0, "lr": 1e-3}
    _, found = adapted(**settings)
    assert found.choices["augment"]["flip"] is False
    _, found = adapted(symmetric(TRAIN), symmetric(VAL), **settings)
    assert found.choices["augment"] == {"shift": 1, "flip": True}


# ── the same again ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["ra", "covnorm"])
@pytest.mark.slow
def test_the_same_seed_gives_the_same_file_and_another_seed_another(method, tmp_path):
    found = []
    for i, seed in enumerate((0, 0, 1)):
        torch.manual_seed(i)  # what was drawn before does not count
        # a fresh head: with a linear one to fall back to, both seeds may end as that head
        settings = {"seed": seed, "epochs": 6, "head": "fresh"}
        net, _ = adapted(small_digits.batches(100, 20), method=method, **settings)
        found.append(files(net, tmp_path / str(i)))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    ("stage", "step"), [("race", 2), ("race", 20), ("train", 7), ("tune", 3), (None, 0)]
)
@pytest.mark.slow
def test_interrupted_and_called_again_it_is_the_same_to_the_bit(stage, step, tmp_path):
    data = small_digits.batches(200, 20)
    settings = {"method": "covnorm", "variance": 0.9, "epochs": 8, "tuning": {"epochs": 1}}
    net, whole = adapted(data, **settings)
    expected, seen = small_digits.state(net, "d"), []

    def stop(p):
        seen.append(p.stage)
        if p.stage == stage and seen.count(stage) == step:
            raise KeyboardInterrupt

    settings |= {"snapshot": tmp_path / "run", "every": 0 if stage == "train" else 20}
    interrupted = contextlib.nullcontext() if stage is None else pytest.raises(KeyboardInterrupt)
    with interrupted:
        adapted(data, progress=stop, **settings)
    later = []
    net, again = adapted(data, progress=later.append, **settings)
    assert small_digits.same(small_digits.state(net, "d"), expected)
    assert (again.choices, again.stages) == (whole.choices, whole.stages)
    assert ("race" in {p.stage for p in later}) == (stage == "race"), "it is not chosen twice"


# ── the mean of several runs ──────────────────────────────────────────────────────────────────


def test_a_domain_is_the_mean_of_its_runs():
    """As `fit` gives them one by one, each from the same start with a seed of its own."""
    settings = {"training": "default", "lr": 1e-2, "augment": small_digits.noisy}
    net, _ = adapted(val=None, epochs=1, runs=3, **settings)
    ends = []
    for i in range(3):
        alone, _ = adapted(val=None, epochs=0, **settings)
        given = {"lr": 1e-2, "augment": small_digits.noisy, "seed": i * NEXT_RUN}
        cn.fit(alone, "d", TRAIN, epochs=1, progress=False, **given)
        ends.append(small_digits.state(alone, "d"))
    for key, found in small_digits.state(net, "d").items():
        if found.is_floating_point():
            parts = torch.stack([end[key].double() for end in ends])
            torch.testing.assert_close(found, parts.mean(0).float(), atol=1e-7, rtol=1e-6)
    assert not small_digits.same(ends[0], ends[1]), "a control: the runs differ"


@pytest.mark.parametrize("val", [VAL, None], ids=["validated", "not validated"])
def test_runs_that_are_too_far_apart_for_a_mean_leave_the_best_of_them(val, monkeypatch):
    settings = {"training": "default", "epochs": 3, "lr": 1e-2, "runs": 2}
    settings |= {"augment": small_digits.noisy, "val": val}
    _, found = adapted(**settings)
    assert found.choices["kept"] == "the mean of the runs", "a control"
    ends = []

    def nothing(states):
        ends.extend(states)
        return {k: -t if k.endswith(("weight", "A")) else t for k, t in states[0].items()}

    monkeypatch.setattr(run, "_mean", nothing)
    net, found = adapted(**settings)
    assert found.choices["kept"] == "the best run"
    kept = small_digits.state(net, "d")
    assert any(all(torch.equal(kept[k], end[k]) for k in kept) for end in ends)


@pytest.mark.slow
def test_it_resumes_in_the_second_run(tmp_path):
    settings = {"epochs": 2, "lr": 1e-3, "runs": 2}
    net, whole = adapted(**settings)
    expected, seen = small_digits.state(net, "d"), []

    def stop(p):
        seen.append(p)
        if len(seen) == 3 * len(TRAIN) + 2:
            raise KeyboardInterrupt

    settings |= {"snapshot": tmp_path / "run", "every": 0}
    with pytest.raises(KeyboardInterrupt):
        adapted(progress=stop, **settings)
    later = []
    net, again = adapted(progress=later.append, **settings)
    assert small_digits.same(small_digits.state(net, "d"), expected)
    assert (again.choices, again.stages) == (whole.choices, whole.stages)
    assert len(later) < len(TRAIN), "what was done is not done again"


def test_tuning_runs_once():
    settings = {"epochs": 1, "lr": 1e-3, "runs": 2, "augment": "none"}
    steps = []
    adapted(method="covnorm", variance=0.9, progress=steps.append, **settings)
    for stage, epochs in {"train": 2, "tune": 1}.items():
        found = [(p.epoch, p.epochs) for p in steps if p.stage == stage]
        assert found == [(i, epochs) for i in range(epochs) for _ in TRAIN]
    with pytest.raises(cn.CovNormError, match="tuning has runs=2: only the first stage"):
        adapted(method="covnorm", tuning={"runs": 2}, **settings)


def test_given_epochs_are_one_run():
    steps = []
    adapted(epochs=2, lr=1e-3, progress=steps.append)
    assert len([p for p in steps if p.stage == "train"]) == 2 * len(TRAIN)


# ── never clearly worse than the linear head ──────────────────────────────────────────────────


@pytest.mark.parametrize("factor", [30, 1000])
@pytest.mark.parametrize("method", ["ra", "covnorm"])
@pytest.mark.slow
def test_a_rate_that_is_far_too_high_does_not_end_below_the_linear_head(factor, method):
    usual = 3e-3
    net, found = adapted(method=method, lr=factor * usual, epochs=6)
    _, right = linear()
    assert not clearly_worse(correct(net, "d", VAL), right)
    assert found.accuracy == cn.evaluate(net, "d", VAL).accuracy
    if factor == 1000:
        fixed, control = network(), {"training": "default", "lr": factor * usual, "epochs": 6}
        cn.adapt(fixed, "d", TRAIN, VAL, "ra", classes=10, **control)
        assert clearly_worse(correct(fixed, "d", VAL), right), "a control"


MISLED = {"epochs": 4, "lr": 0.05, "statistics": TRAIN, "recover": False}


def misleading():
    """Training images with wrong labels, beside the same with the right ones."""
    return [(x, (y + 1 + torch.arange(len(y)) % 8) % 10) for x, y in TRAIN]


def test_a_domain_that_is_clearly_worse_than_the_linear_head_becomes_it(tmp_path):
    """What the moments and the linear head see is right; what trains the adapters is not."""
    net, found = adapted(misleading(), **MISLED)
    assert found.linear
    assert found.ranks == dict.fromkeys(net.sites, (0, 0))
    assert all(adapter.idle for adapter in net.domain("d").adapters.values())
    assert found.parameters["adapter"] == found.parameters["norm"] == 0
    folder = net.save_domain("d", tmp_path / "d")
    assert sum(f.stat().st_size for f in folder.iterdir()) < 5000
    other = network().eval()
    other.load_domain(folder)
    logits, right = linear()
    with torch.no_grad():
        answers = torch.cat([other(x, domain="d") for x, _ in VAL])
    torch.testing.assert_close(answers, logits, atol=1e-3, rtol=1e-4)
    assert found.accuracy == found.stages["linear"] == 100 * float(right.double().mean())


def test_the_whole_cycle_is_run_although_validation_falls_in_between():
    def epochs(**given):
        steps = []
        adapted(misleading(), progress=steps.append, lr=0.05, recover=False, **given)
        return len({p.epoch for p in steps if p.stage == "train"})

    assert epochs(runs=1) == round(300 / 200**0.5)
    assert epochs(runs=1, stop_after=2) < 10, "a control"


def test_control_what_adapts_well_keeps_its_adapters():
    net, found = adapted(epochs=8, lr=0.02, augment="none")
    assert not found.linear
    assert not any(adapter.idle for adapter in net.domain("d").adapters.values())
    assert found.parameters["adapter"] == sum(s.d_out**2 for s in net.sites.values())
    assert found.accuracy > found.stages["linear"] + 5


def test_a_trained_domain_or_a_fresh_head_is_never_replaced():
    """Only what was added by this call, and beside a linear head, may become that head."""
    net, found = adapted(misleading(), **MISLED, head="fresh")
    assert not found.linear
    assert "linear" not in found.stages
    net, _ = adapted(training="default", epochs=1)
    again = cn.adapt(net, "d", misleading(), VAL, "ra", **MISLED)
    assert not again.linear
