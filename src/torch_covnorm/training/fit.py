"""`fit`: one plain loop that trains what a domain owns.

Your own loop over `MultiDomainNetwork.parameters_of` is as good.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..network.network import MultiDomainNetwork
from ..records import blame
from .evaluation import Criterion
from .loop import Loop, Penalty
from .progress import Report, showing
from .schedules import Training, training_of
from .seeds import random_numbers_kept
from .snapshot import Snapshot, restore_


@dataclass(frozen=True)
class Fit:
    """What `fit` did: one row an epoch, and the epoch whose state the domain has now."""

    epochs: list[dict[str, Any]]
    best: int | None
    accuracy: float | None  # on the validation data, in percent
    seconds: float


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

    All random numbers follow from the seed, those of the loader's own generators too.

    A batch of one image has no statistics to normalise by and is left out. Leaves the network in
    eval mode.
    """
    settings = training_of(training).changed(changes)
    loop = Loop(net, name, settings, parameters, criterion, penalty, augment)
    saved = None
    try:
        if snapshot is not None:
            basis = net.domain(name).basis
            shared = None if basis is None else net.basis(basis).fingerprint
            whose = {"backbone": net.fingerprint, "domain": name, "stage": stage, "basis": shared}
            record = whose | settings.record()
            saved = Snapshot(snapshot, record, every)
            if (state := saved.load()) is not None:
                with blame(saved.file):
                    loop.load_state_dict(state)
        with random_numbers_kept(loop.device), showing(progress) as report:
            while loop.epoch < settings.epochs and not loop.stopped:
                loop.run_epoch(train, saved, lambda p: report(replace(p, stage=stage, domain=name)))
                loop.end_epoch(val)
                if saved is not None:
                    saved.save(loop.state_dict())
    finally:
        loop.close()
    if loop.best_state is not None:
        restore_(loop.domain, loop.best_state)
    best = loop.best or {"epoch": None, "accuracy": None}
    return Fit(loop.history, best["epoch"], best["accuracy"], loop.seconds)
