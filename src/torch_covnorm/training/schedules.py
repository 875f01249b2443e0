"""How a stage trains: its optimiser, its learning rate over the epochs, when it stops."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ..errors import CovNormError, choices

OptimizerMaker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
WORDS = {
    "optimizer": ("adamw", "adam", "sgd"),
    "schedule": ("one-cycle", "cosine", "plateau", "steps", "constant"),
    "norms": ("batch", "frozen"),
    "precision": ("float32", "mixed"),
}


NUMBERS = {  # whole ones, any ones
    "epochs": int,
    "patience": int,
    "stop_after": int,
    "seed": int,
    "lr": float,
    "head_lr": float,
    "weight_decay": float,
    "momentum": float,
    "clip": float,
}


@dataclass(frozen=True)
class Training:
    """The settings of one stage of training. ``replace`` makes variants; see `TRAININGS`.

    optimizer: "adamw", "adam", "sgd"; a class of torch's, called with lr and weight_decay; or a
        function from parameters (a list of groups, as torch's optimisers take it) to an optimiser,
        which then has its own rate.
    head_lr: another rate for the domain's head, which starts from nothing.
    schedule: factors of lr. "one-cycle" rises over 30 % of the epochs and falls to 0, "cosine"
        falls from the start, "plateau" is the paper's (÷10 when the training loss has not fallen
        for more than `patience` epochs), "steps" is ÷10 at each epoch of `milestones`, "constant";
        or a function from the epoch, a fraction included, to the factor.
    stop_after: stop when the validation has not improved for so many epochs.
    norms: the statistics of the backbone's own BatchNorms, per domain: "batch", estimated anew as
        BatchNorm does, or "frozen", as the backbone has them (their scale and shift train). With
        few images, the batches' statistics are noise and frozen ones are better.
    clip: largest norm of the gradient.
    precision: "mixed" is bfloat16 or float16 where the device computes it well, else float32.
    """

    epochs: int = 10
    lr: float = 3e-3
    head_lr: float | None = None
    optimizer: str | OptimizerMaker = "adamw"
    weight_decay: float = 0.01
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str | Callable[[float], float] = "one-cycle"
    milestones: tuple[float, ...] = ()
    patience: int = 3
    stop_after: int | None = None
    norms: str = "batch"
    clip: float | None = None
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, options in WORDS.items():
            value = getattr(self, name)
            function = callable(value) and name in ("optimizer", "schedule")
            if not function and (not isinstance(value, str) or value not in options):
                raise CovNormError(f"{name}={value!r}: {choices(value, options)}")
        for name, kind in NUMBERS.items():
            _check_number(name, getattr(self, name), kind)
        for name in ("betas", "milestones"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or (name == "betas" and len(values) != 2):
                raise CovNormError(f"{name}={values!r}: give a list of numbers")
            for value in values:
                _check_number(name, value, float)
        if self.epochs < 0 or not self.lr > 0:
            raise CovNormError(f"epochs={self.epochs}, lr={self.lr}: give epochs >= 0 and lr > 0")
        if self.schedule == "steps" and not self.milestones:
            raise CovNormError("schedule='steps' needs milestones=(epoch, …)")

    def changed(self, changes: dict[str, Any]) -> Training:
        """With some settings changed; an unknown one is an error."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise CovNormError(f"{name}= is no setting of training: {choices(name, known)}")
        return replace(self, **changes)

    def record(self) -> dict[str, Any]:
        """As plain JSON; a function by its name."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter], head: Iterable[nn.Parameter] = ()
    ) -> torch.optim.Optimizer:
        """The optimiser over these parameters; those of the head may have a rate of their own."""
        groups: list[dict[str, Any]] = [{"params": list(parameters)}]
        if head := list(head):
            rate = {} if self.head_lr is None else {"lr": self.head_lr}
            groups.append({"params": head, **rate})
        groups = [group for group in groups if group["params"]]
        shared: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if isinstance(self.optimizer, type):
            return self.optimizer(groups, **shared)
        if not isinstance(self.optimizer, str):
            return self.optimizer(groups)
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=self.momentum, **shared)
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(groups, betas=self.betas, **shared)

    def factor(self, epoch: float) -> float:
        """Of lr at an epoch in [0, epochs]; what "plateau" does depends on the loss: `Plateau`."""
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


def _check_number(name: str, value: object, kind: type) -> None:
    if value is None and name in ("stop_after", "head_lr", "clip"):
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and (kind is int or not isinstance(value, float)):
        word = "a whole number" if kind is int else "a number"
        raise CovNormError(f"{name}={value!r}: give {word}")


class Plateau:
    """The paper's schedule: ÷10 when the loss has stopped falling (by 1e-4 of itself)."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best: float | None = None
        self.waited = 0
        self.factor = 1.0

    def see(self, loss: float) -> None:
        """Take in the loss of an epoch."""
        if self.best is None or loss < self.best * (1 - 1e-4):
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            self.factor, self.waited = self.factor / 10, 0

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"best": self.best, "waited": self.waited, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.best, self.waited, self.factor = state["best"], state["waited"], state["factor"]


# The trainings that the literature names; the batch size is the loader's.
TRAININGS = {
    "default": Training(),
    # What the paper says is lr and schedule; optimiser and decay are its authors' program's.
    "paper": Training(
        40,
        1e-3,
        optimizer="adam",
        weight_decay=5e-4,
        schedule="plateau",
        patience=2,
        stop_after=10,
    ),
    # The authors' program: batch 16; A, then M with all else.
    "official-code": Training(
        40,
        1e-3,
        optimizer="adam",
        weight_decay=5e-4,
        betas=(0.9, 0.99),
        schedule="steps",
        milestones=(5, 10, 15, 20, 25, 30, 35),
    ),
    # Residual adapters on the Decathlon's ResNet-26: batch 128.
    "decathlon": Training(
        120, 0.1, optimizer="sgd", weight_decay=5e-4, schedule="steps", milestones=(80, 100)
    ),
    # Piggyback: batch 32.
    "piggyback": Training(
        30, 1e-4, optimizer="adam", weight_decay=0.0, schedule="steps", milestones=(15,)
    ),
}


def training_of(training: Training | str | None) -> Training:
    """A training as it is, or by its name in `TRAININGS`; None: the default."""
    if isinstance(training, Training):
        return training
    if training is not None and training not in TRAININGS:
        raise CovNormError(f"training={training!r}: {choices(training, TRAININGS)}")
    return TRAININGS[training or "default"]


def plain(value: Any) -> Any:
    """As plain JSON that is the same in every process: functions and objects by their names."""
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
