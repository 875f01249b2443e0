"""One plain loop that trains what a domain owns. Your own loop over `parameters_of` is as good.

The random numbers of a step are a function of (seed, epoch, step) alone, so a run that was killed
goes on from its snapshot to the same bits: steps already done are only drawn from the loader.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import CovNormError, choices
from .network import MultiDomainNetwork
from .progress import Progress, Report, showing
from .records import blame
from .schedules import TRAININGS, Plateau, Training
from .seeds import random_numbers_kept, seed_all
from .snapshot import Snapshot, check_fits, restore_, tensors_of

Criterion = Callable[[Tensor, Tensor], Tensor]
Penalty = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, accuracy in percent (None where labels are no class numbers), and n images."""

    loss: float
    accuracy: float | None
    n: int


@dataclass(frozen=True)
class Fit:
    """What `fit` did: one row an epoch, and the epoch whose state the domain has now."""

    epochs: list[dict[str, Any]]
    best: int | None
    accuracy: float | None  # on the validation data, in percent
    seconds: float


@torch.no_grad()
def evaluate(
    net: MultiDomainNetwork,
    name: str,
    loader: Iterable[Any],
    criterion: Criterion = F.cross_entropy,
) -> Evaluation:
    """Loss and accuracy of a domain over (images, labels), in eval mode; the mode is kept."""
    was_training, device = net.training, _device(net)
    net.eval()
    loss, right, n, classes = 0.0, 0, 0, True
    try:
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            out = net(images, domain=name)
            loss += criterion(out, labels).item() * len(images)
            n += len(images)
            classes = classes and not labels.is_floating_point() and out.ndim == labels.ndim + 1
            if classes:
                right += int((out.argmax(1) == labels).sum())
    finally:
        net.train(was_training)
    if n == 0:
        raise CovNormError(f"domain {name!r}: the loader gave no images to evaluate")
    return Evaluation(loss / n, 100 * right / n if classes else None, n)


def fit(
    net: MultiDomainNetwork,
    name: str,
    train: Iterable[Any],
    val: Iterable[Any] | None = None,
    training: Training | str | None = None,
    *,
    criterion: Criterion = F.cross_entropy,
    penalty: Penalty | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
    parameters: Sequence[nn.Parameter] | None = None,
    progress: bool | Report | None = None,
    stage: str = "train",
    snapshot: str | os.PathLike[str] | None = None,
    every: float = 20.0,
    **changes: Any,
) -> Fit:
    """Train a domain: its adapters as far as they train, norms and head; the backbone is frozen.

    Args:
        train, val: loaders of (images, labels), iterated once an epoch. With validation data the
            best epoch's state is kept (accuracy, then loss); never give test data here.
        training: a `Training`, or the name of one of `TRAININGS`.
        changes: single settings of it: ``epochs=5, lr=1e-3``.
        criterion: (outputs, labels) → loss, cross-entropy where nothing is said.
        penalty: images → a further loss, called behind the forward pass.
        augment: images → images, for training batches only; draw from torch's random numbers.
        parameters: train only these.
        progress: a function of `Progress`; True or False for a bar; a bar on a terminal if None.
        snapshot: a folder for this stage alone. What was saved there, every `every` seconds, goes
            on to the same result, bit for bit on the CPU; a finished stage is not run again.

    A batch of one image has no statistics to normalise by and is left out. Leaves the network in
    eval mode.
    """
    settings = _training(training).changed(changes)
    loop = _Loop(net, name, settings, parameters, criterion, penalty, augment)
    saved = None
    try:
        if snapshot is not None:
            whose = {"backbone": net.fingerprint, "domain": name, "stage": stage}
            record = whose | settings.record()
            saved = Snapshot(snapshot, record, every)
            if (state := saved.load()) is not None:
                with blame(saved.file):
                    loop.load_state_dict(state)
        with random_numbers_kept(loop.device), showing(progress) as report:
            while loop.epoch < settings.epochs and not loop.stopped:
                loop.run_epoch(train, saved, lambda p: report(_of_stage(p, stage)))
                loop.end_epoch(val)
                if saved is not None:
                    saved.save(loop.state_dict())
    finally:
        loop.close()
    if loop.best_state is not None:
        restore_(loop.domain, loop.best_state)
    best = loop.best or {"epoch": None, "accuracy": None}
    return Fit(loop.history, best["epoch"], best["accuracy"], loop.seconds)


class _Loop:
    """The state of a run: all that a snapshot must hold."""

    def __init__(
        self,
        net: MultiDomainNetwork,
        name: str,
        settings: Training,
        parameters: Sequence[nn.Parameter] | None,
        criterion: Criterion,
        penalty: Penalty | None,
        augment: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.net, self.name, self.settings = net, name, settings
        self.criterion, self.penalty, self.augment = criterion, penalty, augment
        self.domain, self.device = net.domain(name), _device(net)
        trainable = list(net.parameters_of(name))
        chosen = trainable if parameters is None else list(parameters)
        if not chosen:
            raise CovNormError(f"domain {name!r} has nothing to train")
        kept = {id(p) for p in chosen}
        self.frozen = [p for p in trainable if id(p) not in kept]
        self.parameters = chosen
        head = {id(p) for p in self.domain.head.parameters()} if self.domain.head else set()
        self.optimizer = settings.make_optimizer(
            [p for p in chosen if id(p) not in head], [p for p in chosen if id(p) in head]
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.plateau = Plateau(settings.patience)
        self.amp, scaled = _mixed_dtype(self.device, settings.precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self.epoch = self.step = self.images = 0
        self.total = self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.best_state: dict[str, Tensor] | None = None
        self.generators: list[Tensor] | None = None  # of the loader, as the epoch began
        for p in self.frozen:
            p.requires_grad_(False)

    def close(self) -> None:
        """Leave the domain as users expect it: ready to be used or trained on."""
        for p in self.frozen:
            p.requires_grad_(True)
        self.optimizer.zero_grad()
        self.net.eval()

    @property
    def stopped(self) -> bool:
        limit = self.settings.stop_after
        return (
            limit is not None and self.best is not None and self.epoch - self.best["epoch"] > limit
        )

    def run_epoch(self, train: Iterable[Any], saved: Snapshot | None, report: Report) -> None:
        """From where it stands to the end of the epoch."""
        self.net.train()
        steps = _length(train)
        start, images, skip, step = time.perf_counter(), 0, self.step, 0
        seed_all(self.settings.seed, self.epoch, "epoch")
        own = _generators(train)
        if self.generators is None or len(self.generators) != len(own):
            self.generators = [g.get_state() for g in own]
        for generator, state in zip(own, self.generators, strict=True):
            generator.set_state(state)
        batches = iter(train)
        while True:
            seed_all(self.settings.seed, self.epoch, step)
            batch = next(batches, None)
            if batch is None:
                break
            step += 1
            if step <= skip:
                continue
            if len(batch[0]) > 1:
                self.set_rate(self.epoch + (step - 1) / steps if steps else self.epoch)
                self.train_step(*batch)
                images += len(batch[0])
            self.step = step
            rate = images / (time.perf_counter() - start)
            last = self.history[-1]["accuracy"] if self.history else None
            mean = self.total / max(self.images, 1)
            report(Progress("", self.epoch, self.settings.epochs, step, steps, mean, last, rate))
            if saved is not None and saved.due():
                saved.save(self.state_dict())
        if self.images == 0:
            raise CovNormError(
                f"domain {self.name!r}, epoch {self.epoch + 1}: no batch of two or more images; "
                "the loader must be one that can be iterated again, such as a DataLoader or a list"
            )
        self.seconds += time.perf_counter() - start
        self.generators = [g.get_state() for g in own]

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """One step of the optimiser."""
        images, labels = images.to(self.device), labels.to(self.device)
        if self.augment is not None:
            images = self.augment(images)
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            loss = self.criterion(self.net(images, domain=self.name), labels)
            if self.penalty is not None:
                loss = loss + self.penalty(images)
        value = loss.item()
        if not math.isfinite(value):
            raise CovNormError(
                f"domain {self.name!r}: the loss is {value} at epoch {self.epoch + 1}, step "
                f"{self.step + 1}: lower lr, or clip= the gradient"
            )
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.total += value * len(images)
        self.images += len(images)

    def set_rate(self, epoch: float) -> None:
        factor = self.settings.factor(epoch) * self.plateau.factor
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def end_epoch(self, val: Iterable[Any] | None) -> None:
        """Validate, keep the best, go on to the next epoch."""
        loss = self.total / self.images
        row = {"epoch": self.epoch, "loss": loss, "val_loss": None, "accuracy": None}
        if val is not None:
            seed_all(self.settings.seed, self.epoch, "validate")
            found = evaluate(self.net, self.name, val, self.criterion)
            row |= {"val_loss": found.loss, "accuracy": found.accuracy}
            finite = math.isfinite(found.loss)
            if finite and (self.best is None or _merit(row) > _merit(self.best)):
                self.best = row
                self.best_state = {k: t.clone() for k, t in tensors_of(self.domain).items()}
        if self.settings.schedule == "plateau":
            self.plateau.see(loss)
        self.history.append(row)
        self.epoch += 1
        self.step = self.images = 0
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "domain": tensors_of(self.domain),
            "best_state": self.best_state,
            "optimizer": self.optimizer.state_dict(),
            "plateau": self.plateau.state_dict(),
            "scaler": self.scaler.state_dict(),
            **{key: getattr(self, key) for key in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fits(self.domain, state["domain"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_(self.domain, state["domain"])
        self.best_state = state["best_state"]
        self.plateau.load_state_dict(state["plateau"])
        self.scaler.load_state_dict(state["scaler"])
        for key in _COUNTERS:
            setattr(self, key, state[key])


_COUNTERS = ("epoch", "step", "images", "total", "seconds", "history", "best", "generators")


def _merit(row: dict[str, Any]) -> tuple[float, float]:
    """Accuracy first, where there is one; then the loss."""
    return (0.0 if row["accuracy"] is None else row["accuracy"], -row["val_loss"])


def _training(training: Training | str | None) -> Training:
    if isinstance(training, Training):
        return training
    if training is not None and training not in TRAININGS:
        raise CovNormError(f"training={training!r}: {choices(training, TRAININGS)}")
    return TRAININGS[training or "default"]


def _of_stage(p: Progress, stage: str) -> Progress:
    return Progress(**{**vars(p), "stage": stage})


def _length(loader: Iterable[Any]) -> int | None:
    """How many batches an epoch has, where the loader knows."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def _generators(loader: object) -> list[torch.Generator]:
    """Generators of a DataLoader's own, which seeding does not reach."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[2], "sampler", None))
    found = [getattr(h, "generator", None) for h in holders]
    return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))


def _device(net: MultiDomainNetwork) -> torch.device:
    return next(net.backbone.parameters()).device


def _mixed_dtype(device: torch.device, precision: str) -> tuple[torch.dtype | None, bool]:
    """The dtype of autocast, None for float32, and whether gradients must be scaled."""
    if precision == "float32":
        return None, False
    if device.type == "cuda":
        good = torch.cuda.is_bf16_supported()
        return (torch.bfloat16, False) if good else (torch.float16, True)
    if device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16, False
    return None, False  # slower there than float32, or not at all
