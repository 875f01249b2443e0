"""Train a domain with `fit`.

A loop of your own over `MultiDomainNetwork.parameters_of` works as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..network.network import MultiDomainNetwork
from ..records import blame
from .evaluation import Criterion
from .loop import Loop, Penalty
from .progress import Report, reporting
from .schedules import Training, training_of
from .seeds import random_numbers_kept
from .snapshot import Snapshot, restore_


@dataclass(frozen=True)
class Fit:
    """The result of `fit`.

    epochs: one row per epoch.
    best: the epoch whose state the domain has now, None without validation data.
    accuracy: its validation accuracy in percent.
    """

    epochs: list[dict[str, Any]]
    best: int | None
    accuracy: float | None
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
    """Train the adapters, norms and head of a domain. The backbone is frozen.

    Args:
        train, val: loaders of (images, labels), iterated once per epoch. With validation data the
            state of the best epoch is kept (by accuracy, then loss). Never pass test data here.
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
    settings = training_of(training).changed(changes)
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
    if loop.best_state is not None:
        restore_(loop.domain, loop.best_state)
    best = loop.best or {"epoch": None, "accuracy": None}
    return Fit(loop.history, best["epoch"], best["accuracy"], loop.seconds)
