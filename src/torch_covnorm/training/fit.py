"""Train a domain with `fit`.

A loop of your own over `MultiDomainNetwork.parameters_of` works as well.

The random numbers of a step depend only on (seed, epoch, step). A killed run therefore resumes from
its snapshot to the same bits: the loader is advanced past the batches of finished steps.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from ..records import blame
from .batches import as_loader, labels_of
from .evaluation import Criterion, evaluate
from .processes import check_single_process
from .progress import Progress, Report, reporting
from .schedules import Plateau, Training, training_of
from .seeds import random_numbers_kept, seed_all, seed_loader
from .snapshot import Snapshot, check_fits, restore_, tensors_of

Penalty = Callable[[Tensor], Tensor]
_COUNTERS = (
    "epoch",
    "step",
    "images",
    "total",
    "seconds",
    "history",
    "best",
    "settled",
    "first",
    "slowed",
)
_SLOWER = 1 / 3  # factor of the rates after training diverged
WORSE = 1.5  # factor of the loss at the start: above it, an epoch has diverged


@dataclass(frozen=True)
class Fit:
    """The result of `fit`.

    epochs: one row per epoch.
    best: the epoch whose state the domain has now, None without validation data.
    accuracy: its validation accuracy in percent.
    slowed: how often training diverged and went on with a third of the rate.
    """

    epochs: list[dict[str, Any]]
    best: int | None
    accuracy: float | None
    seconds: float
    slowed: int = 0


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
    """Train the adapters, norms and head of a domain. The backbone is frozen.

    Args:
        train, val: loaders of (images, labels) or of dictionaries, iterated once per epoch, or
            Datasets; see `training.batches`. With validation data the state of the best epoch is
            kept (by accuracy, then loss). Never pass test data here.
        training: a `Training`, or a name in `TRAININGS`.
        changes: single settings that replace those of `training`: ``epochs=5, lr=1e-3``.
        criterion: (outputs, labels) → loss.
        penalty: images → an additional loss, called after the forward pass.
        augment: images → images, for training batches only. Draw from torch's random numbers.
        parameters: train only these.
        progress: a function that takes a `Progress`; True or False for a bar or none; None for a
            bar on a terminal.
        snapshot: a folder for this stage only. The state is saved there every `every` seconds. The
            same call then resumes and gives the same result, bit for bit on the CPU. A finished
            stage is not run again.

    All random numbers follow from the seed, including those of the loader's own generators.

    Batches of one image are skipped, because they have no batch statistics. The network is left in
    eval mode.
    """
    check_single_process("cn.fit")
    inputs = net.domain(name).preprocessing
    train = as_loader(train, inputs, shuffle=True, again=True)
    val = as_loader(val, inputs, again=True)
    settings = training_of(training).changed(changes)
    if "auto" in (settings.epochs, settings.lr):
        raise CovNormError(
            f"epochs={settings.epochs!r}, lr={settings.lr!r}: fit takes numbers. cn.adapt chooses "
            "them from the data."
        )
    if settings.runs not in (1, "auto"):
        raise CovNormError(
            f"runs={settings.runs}: fit trains once. cn.adapt averages several runs."
        )
    loop = Loop(net, name, settings, stage, parameters, criterion, penalty, augment)
    saved = None
    try:
        if snapshot is not None:
            basis = net.domain(name).basis
            record = {
                "backbone": net.fingerprint,
                "domain": name,
                "stage": stage,
                "basis": None if basis is None else net.basis(basis).fingerprint,
                **settings.record(),
            }
            saved = Snapshot(snapshot, record, every)
            if (state := saved.load()) is not None:
                with blame(saved.file):
                    loop.load_state_dict(state)
        with random_numbers_kept(loop.device), reporting(progress) as report:
            while loop.epoch < settings.epochs and not loop.stopped:
                loop.run_epoch(train, saved, report)
                loop.end_epoch(val)
                if saved is not None:
                    saved.save(loop.state_dict())
    finally:
        loop.close()
    kept = loop.kept()
    if loop.best_state is not None and kept is loop.best:
        restore_(loop.domain, loop.best_state)
    kept = kept or {"epoch": None, "accuracy": None}
    return Fit(loop.history, kept["epoch"], kept["accuracy"], loop.seconds, loop.slowed)


class Loop:
    """One stage of training: the domain, the optimizer and the current position."""

    def __init__(
        self,
        net: MultiDomainNetwork,
        name: str,
        settings: Training,
        stage: str,
        parameters: Sequence[nn.Parameter] | None,
        criterion: Criterion,
        penalty: Penalty | None,
        augment: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.net, self.name, self.settings, self.stage = net, name, settings, stage
        self.criterion, self.penalty, self.augment = criterion, penalty, augment
        self.domain, self.device = net.domain(name), next(net.backbone.parameters()).device
        trainable = list(net.parameters_of(name))
        chosen = trainable if parameters is None else list(parameters)
        if not chosen:
            raise CovNormError(
                f"domain {name!r} has nothing to train. Add it with adapters, or pass parameters=."
            )
        kept = {id(p) for p in chosen}
        self.parameters, self.excluded = chosen, [p for p in trainable if id(p) not in kept]
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
        self.settled = -1  # the last epoch that was as good as the best, within a standard error
        self.first: list[float] = []  # the losses of the first steps
        self.slowed = 0
        self.before: dict[str, Tensor] | None = None  # the state at the start of the epoch
        for p in self.excluded:
            p.requires_grad_(False)

    def close(self) -> None:
        """Make all of the domain trainable again, and leave the network in eval mode."""
        for p in self.excluded:
            p.requires_grad_(True)
        self.optimizer.zero_grad()
        self.net.eval()

    @property
    def stopped(self) -> bool:
        """Whether validation has not improved, or not stayed as good, for `stop_after` epochs."""
        limit, best = self.settings.stop_after, self.best
        if limit is None or best is None:
            return False
        since = self.settled if self.settings.keep == "settled" else best["epoch"]
        return bool(self.epoch - since > limit)

    def kept(self) -> dict[str, Any] | None:
        """Return the row of the epoch whose state to keep; None without validation data."""
        last = self.history[-1] if self.history else None
        if self.settings.keep == "settled" and last and self.settled == last["epoch"]:
            return last
        return self.best

    def run_epoch(self, train: Iterable[Any], saved: Snapshot | None, report: Report) -> None:
        """Train from the current position to the end of the epoch."""
        self.net.train_domain(self.name)
        if self.settings.norm_statistics != "batch":
            self.domain.norms.eval()
        if self.settings.norm_statistics == "calibrated":
            for adapter in self.domain.adapters.values():
                adapter.B1.eval()
        if self.settings.recover and self.before is None:
            self.before = {k: t.clone() for k, t in tensors_of(self.domain).items()}
        steps = operator.length_hint(train) or None  # None: the loader does not know it
        start, images, skip, step = time.perf_counter(), 0, self.step, 0
        seed_all(self.settings.seed, self.epoch, "epoch")
        seed_loader(train, self.settings.seed, self.epoch)
        batches = iter(train)
        while True:
            seed_all(self.settings.seed, self.epoch, step)
            if (batch := next(batches, None)) is None:
                break
            step += 1
            if step <= skip:
                continue
            if len(batch[0]) > 1:
                self.set_rate(self.epoch + (step - 1) / steps if steps else self.epoch)
                if not self.train_step(*batch):
                    self.slow_down()
                images += len(batch[0])
            self.step = step
            rate = images / (time.perf_counter() - start)
            last = self.history[-1]["accuracy"] if self.history else None
            mean = self.total / max(self.images, 1)
            place = (self.stage, self.epoch, self.settings.epochs, step, steps)
            report(Progress(*place, mean, last, rate, self.name))
            if saved is not None and saved.due():
                saved.save(self.state_dict())
        if self.images == 0 and images == 0:
            raise CovNormError(
                f"domain {self.name!r}, epoch {self.epoch + 1}: no batch of two or more images. "
                "Use a loader that can be iterated again, such as a DataLoader or a list."
            )
        self.seconds += time.perf_counter() - start

    def train_step(self, images: Tensor, labels: Tensor) -> bool:
        """Take one optimizer step; return whether the loss was finite."""
        images = images.to(self.device)
        labels = labels_of(labels, self.domain).to(self.device)
        if self.augment is not None:
            images = self.augment(images)
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            loss = self.criterion(self.net(images, domain=self.name), labels)
            if self.penalty is not None:
                loss = loss + self.penalty(images)
        value = loss.item()
        if not math.isfinite(value):
            if self.settings.recover:
                return False
            raise CovNormError(
                f"domain {self.name!r}: the loss is {value} at epoch {self.epoch + 1}, step "
                f"{self.step + 1}. Lower lr=, or limit the gradient with clip=."
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
        if len(self.first) < 5:
            self.first.append(value)
        return True

    def limit(self) -> float:
        """Return the mean loss above which an epoch has diverged.

        It counts from the loss at the start or, if that is low already, from half of that of a
        guess among all classes.
        """
        start = sum(self.first) / max(len(self.first), 1)
        return WORSE * max(start, math.log(self.domain.width or 1) / 2)

    def slow_down(self) -> None:
        """Return to the state at the start of the epoch and continue with a third of the rate."""
        assert self.before is not None
        restore_(self.domain, self.before)
        self.optimizer.state.clear()
        self.slowed += 1

    def set_rate(self, epoch: float) -> None:
        """Set the learning rates for an epoch, which may be fractional."""
        factor = self.settings.factor(epoch) * self.plateau.factor * _SLOWER**self.slowed
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def end_epoch(self, val: Iterable[Any] | None) -> None:
        """Validate, keep the best state, and move to the next epoch."""
        loss = self.total / max(self.images, 1)
        if self.settings.recover and not (self.images and loss <= self.limit()):
            self.slow_down()
        self.before = None
        row = {"epoch": self.epoch, "loss": loss, "val_loss": None, "accuracy": None}
        if val is not None:
            seed_all(self.settings.seed, self.epoch, "validate")
            result = evaluate(self.net, self.name, val, self.criterion)
            row |= {"val_loss": result.loss, "accuracy": result.accuracy}
            finite = math.isfinite(result.loss)
            if finite and (self.best is None or _merit(row) > _merit(self.best)):
                self.best = row
                self.best_state = {k: t.clone() for k, t in tensors_of(self.domain).items()}
            if finite and self.best is not None:
                error = 0.0 if result.accuracy is None else result.standard_error
                if _merit(row)[0] >= _merit(self.best)[0] - error:
                    self.settled = self.epoch
        if self.settings.schedule == "plateau":
            self.plateau.update(loss)
        self.history.append(row)
        self.epoch += 1
        self.step = self.images = 0
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, for `Snapshot.save`."""
        return {
            "domain": tensors_of(self.domain),
            "best_state": self.best_state,
            "before": self.before,
            "optimizer": self.optimizer.state_dict(),
            "plateau": self.plateau.state_dict(),
            "scaler": self.scaler.state_dict(),
            **{key: getattr(self, key) for key in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. One of another domain is an error and changes nothing."""
        check_fits(self.domain, state["domain"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_(self.domain, state["domain"])
        self.best_state, self.before = state["best_state"], state["before"]
        self.plateau.load_state_dict(state["plateau"])
        self.scaler.load_state_dict(state["scaler"])
        for key in _COUNTERS:
            setattr(self, key, state[key])


def _merit(row: dict[str, Any]) -> tuple[float, float]:
    """Rank by accuracy if there is one, then by loss."""
    return (0.0 if row["accuracy"] is None else row["accuracy"], -row["val_loss"])


def _mixed_dtype(device: torch.device, precision: str) -> tuple[torch.dtype | None, bool]:
    """Return the autocast dtype (None: float32) and whether gradients need scaling."""
    if precision == "float32":
        return None, False
    if device.type == "cuda":
        bfloat16 = torch.cuda.is_bf16_supported()
        return (torch.bfloat16, False) if bfloat16 else (torch.float16, True)
    if device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16, False
    return None, False  # slower than float32 there, or unsupported
