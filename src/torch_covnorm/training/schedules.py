"""Training settings: the optimizer, the learning rate schedule, and when to stop."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ..errors import CovNormError, check_choice, choices

OptimizerMaker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
CHOICES = {
    "optimizer": ("adamw", "adam", "sgd"),
    "schedule": ("one-cycle", "cosine", "plateau", "steps", "constant"),
    "norm_statistics": ("batch", "frozen", "calibrated"),
    "precision": ("float32", "mixed"),
    "head": ("fresh", "probe"),
    "augment": ("none", "auto"),
    "class_weights": ("none", "auto"),
    "keep": ("best", "settled"),
}
AUTO = "auto"
# Defaults that depend on whether the number of epochs is given or "auto".
_GIVEN: dict[str, Any] = {
    "lr": 3e-3,
    "norm_statistics": "batch",
    "head": "fresh",
    "augment": "none",
    "class_weights": "none",
    "keep": "best",
    "recover": False,
    "runs": 1,
}
_CHOSEN: dict[str, Any] = {
    "lr": AUTO,
    "norm_statistics": "calibrated",
    "head": "probe",
    "augment": AUTO,
    "class_weights": AUTO,
    "keep": "settled",
    "recover": True,
    "runs": AUTO,
}
INTEGERS = ("epochs", "patience", "stop_after", "seed", "runs")
NUMBERS = ("lr", "head_lr", "weight_decay", "momentum", "clip")
OPTIONAL = ("stop_after", "head_lr", "clip")


@dataclass(frozen=True)
class Training:
    """The settings of one training stage. See `TRAININGS` for named ones.

    ``Training("auto")`` finds its settings from the data, as `training.auto` describes. It is what
    `adapt` uses by default. A setting that is given is not chosen: ``Training("auto", lr=1e-3)``.

    epochs, lr: numbers, or "auto" to let `adapt` choose them.
    runs: how often `adapt` trains a new domain, each time from the same start with another seed. It
        keeps the mean of the trained parameters, which is better than each of them with few images.
        "auto" is chosen with the epochs, which are those of one run.
    optimizer: "adamw", "adam" or "sgd"; a torch optimizer class, called with lr and weight_decay;
        or a function from parameter groups to an optimizer, which then sets its own rate.
    head_lr: a separate rate for the domain's head, which starts untrained.
    schedule: how lr changes. "one-cycle" rises for 30 % of the epochs, then falls to 0. "cosine"
        falls from the start. "plateau" is the paper's: ÷10 if the training loss has not fallen for
        more than `patience` epochs. "steps" is ÷10 at each epoch in `milestones`. "constant" keeps
        lr. Or a function from the epoch, which may be fractional, to the factor of lr.
    stop_after: stop if validation has not improved for this many epochs.
    norm_statistics: of the domain's norms: B1 of its adapters, and its copies of the backbone's.
        "batch" estimates them from the batches. "frozen" keeps the backbone's in the copies, whose
        scale and shift train; this is better with few images, because their batch statistics are
        noisy. "calibrated" also keeps those of B1, which `adapt` sets from all training images.
    head: how `adapt` starts a new head: "fresh" (random), or "probe": as the linear head that fits
        the features of the bare backbone best.
    augment: "auto" lets `adapt` shift the training images, and mirror them if the validation images
        show that mirrored ones keep their class. "none" leaves them as the loader yields them.
    class_weights: "auto" gives rare classes more weight in the loss of `adapt`, if the largest
        class has more than three times as many images as the smallest.
    keep: the state to keep. "best" is that of the epoch with the highest validation accuracy.
        "settled" is that of the last epoch, unless it is worse than the best by more than one
        standard error: with few validation images the best epoch is best by chance. `adapt` then
        averages the trained parameters of a new domain with those at the start, if that validates
        clearly better, and trains on fewer than 100 validation images too, once they have chosen
        the settings (`everything=`).
    recover: if training diverges, go back to the last good epoch and continue with a third of the
        rate. Otherwise a loss that is not finite is an error.
    clip: the largest gradient norm.
    precision: "mixed" uses bfloat16 or float16 if the device is fast at it, else float32.
    """

    epochs: Any = 10  # int or "auto"
    lr: Any = None  # float or "auto"; None: 3e-3, or "auto" if the epochs are
    head_lr: float | None = None
    optimizer: str | OptimizerMaker = "adamw"
    weight_decay: float = 0.01
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str | Callable[[float], float] = "one-cycle"
    milestones: tuple[float, ...] = ()
    patience: int = 3
    stop_after: int | None = None
    norm_statistics: str = ""
    head: str = ""
    augment: str = ""
    class_weights: str = ""
    keep: str = ""
    recover: bool | None = None
    clip: float | None = None
    precision: str = "float32"
    seed: int = 0
    runs: Any = None  # int or "auto"; None: 1, or "auto" if the epochs are

    def __post_init__(self) -> None:
        for name, value in (_CHOSEN if self.epochs == AUTO else _GIVEN).items():
            if getattr(self, name) in ("", None):
                object.__setattr__(self, name, value)
        for name, options in CHOICES.items():
            value = getattr(self, name)
            if not (callable(value) and name in ("optimizer", "schedule")):
                check_choice(name, value, options)
        for name in (*INTEGERS, *NUMBERS):
            value = getattr(self, name)
            left_open = value is None and name in OPTIONAL
            left_open = left_open or (value == AUTO and name in ("epochs", "lr", "runs"))
            if not left_open:
                _check_number(name, value, name in INTEGERS)
        for name in ("betas", "milestones"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or (name == "betas" and len(values) != 2):
                raise CovNormError(f"{name}={values!r}: must be a list of numbers")
            for value in values:
                _check_number(name, value, False)
        if (self.epochs != AUTO and self.epochs < 0) or (self.lr != AUTO and not self.lr > 0):
            raise CovNormError(
                f"epochs={self.epochs}, lr={self.lr}: epochs must be >= 0 and lr > 0"
            )
        if self.runs != AUTO and self.runs < 1:
            raise CovNormError(f"runs={self.runs}: must be >= 1")
        if self.schedule == "steps" and not self.milestones:
            raise CovNormError("schedule='steps': set milestones=(epoch, …) as well")

    def changed(self, changes: dict[str, Any]) -> Training:
        """Return a copy with some settings replaced; an unknown name is an error."""
        known = [f.name for f in fields(self)]
        if changes.get("norms") in CHOICES["norm_statistics"]:
            changes = dict(changes)
            changes["norm_statistics"] = renamed_norms(changes.pop("norms"))
        for name in changes:
            if name not in known:
                raise CovNormError(f"{name}= is not a training setting: {choices(name, known)}")
        return replace(self, **changes)

    def record(self) -> dict[str, Any]:
        """Return the settings as plain JSON, with functions by name."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter], head: Iterable[nn.Parameter] = ()
    ) -> torch.optim.Optimizer:
        """Make the optimizer. The head's parameters use `head_lr` if it is set."""
        rate = {} if self.head_lr is None else {"lr": self.head_lr}
        groups: list[dict[str, Any]]
        groups = [{"params": list(parameters)}, {"params": list(head), **rate}]
        groups = [group for group in groups if group["params"]]
        shared: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if isinstance(self.optimizer, type):
            return self.optimizer(groups, **shared)
        if not isinstance(self.optimizer, str):
            return self.optimizer(groups)
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=self.momentum, **shared)
        adam = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return adam(groups, betas=self.betas, **shared)

    def factor(self, epoch: float) -> float:
        """Return the factor of lr at an epoch in [0, epochs]. For "plateau" see `Plateau`."""
        if not isinstance(self.schedule, str):
            return self.schedule(epoch)
        share = epoch / max(self.epochs, 1)
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * share)) / 2
        if self.schedule == "steps":
            return 0.1 ** sum(epoch >= m for m in self.milestones)
        if self.schedule == "one-cycle":
            if share < 0.3:
                return 0.04 + 0.96 * (1 - math.cos(math.pi * share / 0.3)) / 2
            return (1 + math.cos(math.pi * (share - 0.3) / 0.7)) / 2
        return 1.0


def renamed_norms(value: str) -> str:
    """Return the value of what was norms="batch" or "frozen" in version 0.1, with a warning."""
    warnings.warn(
        f"norms={value!r} is now norm_statistics={value!r}, and norms= is 'shared', 'sites' or "
        "'own': which norms of the backbone a domain copies",
        DeprecationWarning,
        stacklevel=4,
    )
    return value


def _check_number(name: str, value: object, integer: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise CovNormError(f"{name}={value!r}: must be {'an integer' if integer else 'a number'}")


@dataclass
class Plateau:
    """The paper's schedule: divide lr by 10 once the loss falls by less than 0.01 %."""

    patience: int
    best: float | None = None
    waited: int = 0
    factor: float = 1.0

    def update(self, loss: float) -> None:
        """Add the loss of an epoch."""
        if self.best is None or loss < self.best * (1 - 1e-4):
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            self.factor, self.waited = self.factor / 10, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {"best": self.best, "waited": self.waited, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self.best, self.waited, self.factor = state["best"], state["waited"], state["factor"]


_AUTHORS = Training(40, 1e-3, optimizer="adam", weight_decay=5e-4)
# Settings from the literature. The batch size is up to the loader.
TRAININGS = {
    AUTO: Training(AUTO),
    "default": Training(),
    # lr and schedule are from the paper, optimizer and weight decay from its authors' program.
    "paper": replace(_AUTHORS, schedule="plateau", patience=2, stop_after=10),
    # The authors' program, batch 16: train A, then M and everything else.
    "official-code": replace(
        _AUTHORS, betas=(0.9, 0.99), schedule="steps", milestones=(5, 10, 15, 20, 25, 30, 35)
    ),
    # Residual adapters on the Decathlon's ResNet-26, batch 128.
    "decathlon": Training(
        120, 0.1, optimizer="sgd", weight_decay=5e-4, schedule="steps", milestones=(80, 100)
    ),
    # Piggyback, batch 32.
    "piggyback": Training(
        30, 1e-4, optimizer="adam", weight_decay=0.0, schedule="steps", milestones=(15,)
    ),
}


def training_of(training: Training | str | None) -> Training:
    """Return a `Training`, given one or its name in `TRAININGS`; None is the default."""
    if isinstance(training, Training):
        return training
    training = "default" if training is None else training
    check_choice("training", training, TRAININGS)
    return TRAININGS[training]


def plain(value: Any) -> Any:
    """Return a value as JSON that is the same in every process: functions and objects by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, functools.partial):
        return [plain(value.func), plain(value.args), plain(value.keywords)]
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
