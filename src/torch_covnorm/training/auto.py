"""Choose the settings of ``Training("auto")`` from the data.

The choices, in order:

1. epochs by the number of training images (`epochs_for`), all of them: in the middle of a cycle,
   at the highest rate, validation says little about its end, so nothing stops early by default.
   Below 2000 images, three runs of half as many, whose parameters are averaged (`runs_for`);
2. class weights, if the classes are unbalanced (`weights_for`);
3. the head starts as the best linear head on the features of the bare backbone (`start_head_`);
4. mirrored training images, if a linear head is as often right about mirrors of images that it
   was not fitted to (`keeps_class`), and small shifts (`augmentation`);
5. the learning rate: the usual one, unless short runs on the validation images rule it out
   (`race`).

A setting that is given is not chosen. Everything follows from the seed.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from .augment import Augment
from .batches import images_of, labels_of, parts_of
from .evaluation import Criterion
from .fit import fit
from .probe import CROSS_VALIDATED, LinearHead, features, fit_head, right_about
from .progress import Report
from .schedules import AUTO, Training

RATES = (6e-3, 2e-3, 6e-4, 2e-4)
USUAL = 2e-3  # the rate without a race, and whenever the race does not rule it out
TOLERATED = 2  # times the loss of a guess: how far a short run may end above the best one
AVERAGED = 2000  # images, below which the mean of several runs is kept
ENOUGH = 100  # validation images from which a higher rate than the usual one may win
UNBALANCED = 3  # images of the largest class per image of the smallest
SHIFT = 16  # shifts are up to 1/16 of the side
SHORT, LEAST_STEPS = 24, 5  # a run of a race has 1/24 of the steps of training, at least five

Augmentation = Callable[[Tensor], Tensor]


def epochs_for(images: int) -> int:
    """Return 300 / √images, between 6 and 30: few images are seen more often."""
    return min(max(round(300 / math.sqrt(max(images, 1))), 6), 30)


def runs_for(images: int) -> int:
    """Return 3 below 2000 images, else 1.

    Runs from one start end far apart if they see few images. Their mean is better than each, and
    loses less when it is compressed: it has less noise.
    """
    return 3 if images < AVERAGED else 1


def weights_for(counts: Tensor) -> Tensor | None:
    """Return loss weights ∝ 1 / √count (classes,) whose mean over images is 1.

    counts: images per class. None if no class has more than three times as many as another.
    """
    present = counts[counts > 0].double()
    if len(present) < 2 or present.max() <= UNBALANCED * present.min():
        return None
    weights = counts.double().clamp(min=1).rsqrt()
    weights = weights * counts.sum() / (weights * counts).sum()
    return weights.float()


@torch.no_grad()
def start_head_(net: MultiDomainNetwork, name: str, head: LinearHead) -> None:
    """Copy a linear head into the domain's head."""
    layer = net.domain(name).head
    assert isinstance(layer, nn.Linear)
    layer.weight.copy_(head.weight)
    layer.bias.copy_(head.bias)


@torch.no_grad()
def calibrate_(net: MultiDomainNetwork, name: str, images: Iterable[Any]) -> None:
    """Set the statistics of every B1 to those of its input over all images, in the bare network.

    B1 normalizes the output z of its layer: per channel, mean and variance over every position.
    """
    norms = {
        site: adapter.B1
        for site, adapter in net.domain(name).adapters.items()
        if isinstance(adapter.B1, nn.modules.batchnorm._BatchNorm)
    }
    counts = dict.fromkeys(norms, 0)
    sums: dict[str, Any] = {}
    squares: dict[str, Any] = {}

    def observe(site: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, __: Any, z: Tensor) -> None:
            rows = z.movedim(1, -1) if net.sites[site].spatial else z
            rows = rows.reshape(-1, rows.shape[-1]).double()
            counts[site] += len(rows)
            sums[site] = sums.get(site, 0) + rows.sum(0)
            squares[site] = squares.get(site, 0) + rows.square().sum(0)

        return hook

    device = next(net.backbone.parameters()).device
    layers = {site: net.backbone.get_submodule(site) for site in norms}
    hooks = [layer.register_forward_hook(observe(site)) for site, layer in layers.items()]
    try:
        with eval_mode(net.backbone):
            for batch in images if norms else ():
                net.backbone(images_of(batch).to(device))
    finally:
        for handle in hooks:
            handle.remove()
    for site, norm in norms.items():
        if n := counts[site]:
            mean = sums[site] / n
            norm.get_buffer("running_mean").copy_(mean)
            norm.get_buffer("running_var").copy_((squares[site] / n - mean.square()).clamp(min=0))


def keeps_class(right: Tensor, mirrored: Tensor) -> bool:
    """Return whether mirrored images keep their class, as far as a linear head can tell.

    right, mirrored: booleans (n,), whether the head is right about each image and its mirror. The
    mirrors may lose at most as many as chance would: a standard error of the difference.
    """
    return not clearly_worse(mirrored, right)


def clearly_worse(a: Tensor, b: Tensor) -> bool:
    """Return whether a (n,) is right less often than b (n,), by more than a standard error.

    The error is that of the paired difference, √(lost + gained) answers.
    """
    lost, gained = int((b & ~a).sum()), int((~b & a).sum())
    return lost - gained > math.sqrt(lost + gained)


def augmentation(shift: int, flip: bool) -> Augment:
    """Return shifts by up to so many pixels, and mirrors if they keep the class."""
    return Augment(padding=shift, fill="reflect", flip=0.5 if flip else 0.0)


# ── the race ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class First:
    """The first batches of a loader."""

    batches: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batches), self.count)

    def __length_hint__(self) -> int:
        return self.count


@torch.no_grad()
def losses(net: MultiDomainNetwork, name: str, loader: Iterable[Any]) -> Tensor:
    """Return the cross-entropy of every image of a loader (n,), in eval mode."""
    domain, device = net.domain(name), next(net.backbone.parameters()).device
    found = []
    with eval_mode(net.backbone, domain):
        for images, labels in loader:
            logits = net(images.to(device), domain=name)
            target = labels_of(labels, domain).to(device)
            found.append(F.cross_entropy(logits, target, reduction="none").double().cpu())
    return torch.cat(found).nan_to_num(nan=1e9, posinf=1e9)


def clearly_lower(a: Tensor, b: Tensor) -> bool:
    """Return whether losses a (n,) are below b (n,) by more than a standard error of b - a."""
    difference = b - a
    error = difference.std() / math.sqrt(len(a)) if len(a) > 1 else math.inf
    return bool(difference.mean() > error)


def picked_rate(found: Mapping[float, Tensor], classes: int, runs: int = 1) -> float:
    """Return the rate to train with, given the validation losses (n,) of a short run of each rate.

    A short run cannot find the best rate: it favors low ones, because the head starts at its best
    and every change costs at first. But it shows a rate that is too high. So it is the usual rate,
    or the next lower one whose mean loss is at most 2 ln(classes), twice the loss of a guess, above
    the lowest. A higher rate must beat the usual one by more than a standard error of the paired
    difference, on at least 100 images; and there must be one run, because the runs of a high rate
    end too far apart for a mean.
    """
    means = {rate: float(loss.mean()) for rate, loss in found.items()}
    highest = min(means.values()) + TOLERATED * math.log(max(classes, 2))
    rate = max((r for r in found if r <= USUAL and means[r] <= highest), default=min(found))
    faster = [r for r in found if r > USUAL and clearly_lower(found[r], found[USUAL])]
    faster = faster if len(found[USUAL]) >= ENOUGH and runs == 1 else []
    return min(faster, key=lambda r: means[r]) if rate == USUAL and faster else rate


def race(
    net: MultiDomainNetwork,
    name: str,
    train: Iterable[Any],
    val: Iterable[Any],
    training: Training,
    **settings: Any,
) -> tuple[float, dict[str, Any]]:
    """Return the learning rate for a training, and how it was found.

    Every rate of `RATES` trains a copy of the domain for a short while, with its own warm-up and
    decay; together they take about a sixth of the steps of the training, at most a third. Their
    validation losses decide (`picked_rate`).

    settings: `criterion`, `augment` and `progress` of `fit`.
    """
    domain, steps = net.domain(name), operator.length_hint(train)
    total = training.epochs * training.runs * steps
    short = max(int(total / SHORT), LEAST_STEPS)
    if len(RATES) * short > total / 3:
        return USUAL, {"rate": USUAL, "why": "too few training steps for a race"}

    def run(rate: float) -> Tensor:
        net.domains[name] = copy.deepcopy(domain)
        batches = First(train, short) if short < steps else train
        fixed = replace(training, lr=rate, epochs=max(short // steps, 1), runs=1, stop_after=None)
        fit(net, name, batches, None, fixed, stage="race", **settings)
        return losses(net, name, val)

    try:
        found = {rate: run(rate) for rate in RATES}
    finally:
        net.domains[name] = domain
    rate = picked_rate(found, domain.width or 2, training.runs)
    means = {f"{r:g}": round(float(loss.mean()), 4) for r, loss in found.items()}
    return rate, {"rate": rate, "validation loss": means}


# ── all choices ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Chosen:
    """What was chosen: the training with numbers, the augmentation, the weights of the classes.

    head: the linear head on the bare features, if there is one; `right` (n,) says which validation
    images it classifies correctly. record: every choice as plain JSON, for the store and the user.
    """

    training: Training
    augment: Augmentation | None
    weights: Tensor | None = None
    head: LinearHead | None = None
    right: Tensor | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    def criterion(self, device: torch.device) -> Criterion:
        """Return the loss of the training."""
        if self.weights is None:
            return F.cross_entropy
        return partial(F.cross_entropy, weight=self.weights.to(device))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was chosen, for a snapshot."""
        head, training = self.head, self.training
        return {
            "training": {
                key: getattr(training, key) for key in ("epochs", "lr", "runs", "stop_after")
            },
            "weights": self.weights,
            "head": None if head is None else [head.weight, head.bias, head.decay],
            "right": self.right,
            "record": dict(self.record),
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], training: Training, augment: Augmentation | None
    ) -> Chosen:
        """Return what `state_dict` saved, for the same training and given augmentation."""
        chosen = state["record"].get("augment")
        if augment is None and chosen is not None:
            augment = augmentation(chosen["shift"], chosen["flip"])
        head = None if state["head"] is None else LinearHead(*state["head"])
        training = replace(training, **state["training"])
        return cls(training, augment, state["weights"], head, state["right"], state["record"])


def choose(
    net: MultiDomainNetwork,
    name: str,
    train: Iterable[Any],
    val: Iterable[Any] | None,
    training: Training,
    *,
    statistics: Iterable[Any] | None = None,
    augment: Augmentation | None = None,
    fresh: bool = True,
    progress: bool | Report | None = None,
) -> Chosen:
    """Choose what a training leaves open, and start the domain accordingly.

    Args:
        statistics: the training images without augmentation; `train` by default.
        augment: given by the user, so not chosen.
        fresh: the domain is untrained. Otherwise its head and norms stay as they are, and it goes
            on with the usual rate.
    """
    images = train if statistics is None else statistics
    record: dict[str, Any] = {}
    labels = _labels(images)
    if labels is None and images is not train:
        images, labels = train, _labels(train)
    weights = None
    if labels is not None and training.class_weights == AUTO:
        weights = weights_for(labels.bincount(minlength=net.domain(name).width or 0))
        record["class weights"] = (
            None if weights is None else [round(w, 3) for w in weights.tolist()]
        )
    head = right = None
    if labels is not None and training.head == "probe" and fresh:
        head, right = _linear_head(net, name, images, val)
        record["head"] = "fresh" if head is None else f"linear head, weight decay {head.decay:g}"
    if training.epochs == AUTO:
        n = sum(len(images_of(batch)) for batch in images)
        averaged = head is not None and not net.domain(name).weights
        training = _with_epochs(training, n, averaged)
        record |= {"epochs": training.epochs, "runs": training.runs}
    elif training.runs == AUTO:
        training = replace(training, runs=1)
    if fresh and training.norm_statistics == "calibrated":
        calibrate_(net, name, images)
    if augment is None and training.augment == AUTO and (side := _side(images)) is not None:
        flip = head is not None and _mirrors_keep_class(net, head, images, val)
        augment = augmentation(max(side // SHIFT, 1), flip)
        record["augment"] = {"shift": augment.padding, "flip": flip}
    chosen = Chosen(training, augment, weights, head, right, record)
    if training.lr == AUTO:
        rate, found = USUAL, {"rate": USUAL, "why": "no labeled validation images for a race"}
        if not fresh:
            found["why"] = "the domain was trained before"
        elif val is not None and labels is not None:
            loss = chosen.criterion(next(net.backbone.parameters()).device)
            given = {"criterion": loss, "augment": augment, "progress": progress}
            rate, found = race(net, name, train, val, training, **given)
        record["lr"] = found
        chosen = replace(chosen, training=replace(training, lr=rate))
    return chosen


def _with_epochs(training: Training, images: int, averaged: bool) -> Training:
    """Return a training with epochs and runs. averaged: the mean of several runs makes sense."""
    epochs, runs = epochs_for(images), training.runs
    if runs == AUTO:
        runs = runs_for(images) if averaged else 1
    return replace(training, epochs=epochs if runs == 1 else -(-epochs // 2), runs=runs)


@dataclass(frozen=True)
class Mirrored:
    """The batches of a loader with their images flipped left to right."""

    batches: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        for images, labels in self.batches:
            yield images.flip(-1), labels


def _mirrors_keep_class(
    net: MultiDomainNetwork,
    head: LinearHead,
    images: Iterable[Any],
    val: Iterable[Any] | None,
) -> bool:
    """Return whether mirrored images keep their class.

    It is tried by cross-validation over the training images, or with many on the validation images.
    """
    classes = len(head.weight)
    if sum(len(images_of(batch)) for batch in images) <= CROSS_VALIDATED:
        batches = list(images)  # two passes over a shuffling loader would not pair the images
        x, y = features(net, batches)
        mirrored, _ = features(net, Mirrored(batches))
        return keeps_class(*right_about(x, mirrored, y.long(), classes, head.decay))
    if val is None:
        return False
    batches = list(val)
    x, y = features(net, batches)
    mirrored, _ = features(net, Mirrored(batches))
    return keeps_class(head(x).argmax(1).eq(y), head(mirrored).argmax(1).eq(y))


def _linear_head(
    net: MultiDomainNetwork, name: str, images: Iterable[Any], val: Iterable[Any] | None
) -> tuple[LinearHead | None, Tensor | None]:
    """Start the domain's head as a linear head on the bare features.

    Returns that head and which validation images it is right about, as far as there are any.
    """
    domain = net.domain(name)
    if not isinstance(domain.head, nn.Linear) or domain.runs_own or net.head_name is None:
        return None, None
    x, y = features(net, images)
    if x.shape[1] != domain.head.in_features:
        return None, None
    held_out = None if val is None else features(net, val)
    head = fit_head(x, labels_of(y, domain), len(domain.head.weight), held_out)
    start_head_(net, name, head)
    return head, None if held_out is None else head(held_out[0]).argmax(1).eq(held_out[1])


def _labels(images: Iterable[Any]) -> Tensor | None:
    """Return all labels (n,) if they are class numbers, else None."""
    labels = []
    for batch in images:
        given = parts_of(batch)[1]
        if given is None:
            return None
        labels.append(torch.as_tensor(given))
    found = torch.cat(labels)
    whole = not found.is_floating_point() and found.dtype != torch.bool
    return found.long() if whole and found.ndim == 1 else None


def _side(images: Iterable[Any]) -> int | None:
    """Return the shorter side of the images, None if they are not (n, c, h, w)."""
    for batch in images:
        x = images_of(batch)
        return min(x.shape[-2:]) if x.ndim == 4 else None
    return None
