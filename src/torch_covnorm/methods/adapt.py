"""`adapt`: adapt the network to a domain by any method, in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CovNormError
from ..network.domain import check_name
from ..network.network import MultiDomainNetwork
from ..records import digest
from ..training.batches import as_loader
from ..training.processes import check_single_process
from ..training.progress import Report
from ..training.schedules import Training, plain
from ..training.seeds import random_numbers_kept, seed_all
from ..training.snapshot import Snapshot, tensors_of
from .config import Config
from .recipes import METHODS
from .run import Run
from .settings import check_for, configure


def adapt(
    net: MultiDomainNetwork,
    name: str | Sequence[str],
    train: Any,
    val: Any = None,
    method: str | Config = "covnorm",
    *,
    classes: Any = None,
    start: Any = None,
    statistics: Any = None,
    test: Any = None,
    everything: Any = None,
    training: Training | str | None = None,
    tuning: Training | Mapping[str, Any] | None = None,
    augment: Callable[[Tensor], Tensor] | str | None = None,
    progress: bool | Report | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    every: float = 20.0,
    keep_trained: bool = False,
    further: bool = False,
    preprocessing: Any = None,
    **options: Any,
) -> Any:
    """Adapt the network to a domain by any method of `METHODS`; returns an `Adapted`.

    Args:
        name: the domain, added if it does not exist. An existing one continues from where it is: a
            method that compresses takes its trained A.
        train, val: loaders of (images, labels) or of dictionaries, or Datasets, as for `fit`. `val`
            chooses the best epoch, so give no test data.
        method: a name in `METHODS`, or a `Config` from `configure`, which holds all settings.
        classes: names, or their number; by default, the labels that the loader yields.
        start: another domain, trained by "ra", "parallel" or "dan", whose A to start from. It is
            copied, so several methods can share one trained A.
        statistics: a loader of the training images without augmentation, for the moments, if
            `train` yields augmented ones. (The moments never see what `augment=` does.)
        test: a loader that is measured after every stage. Nothing is decided by it.
        everything: a loader of the training and validation images together. If fewer than 100 of
            them are for validation, these choose the settings, and the domain is then trained on
            all. Nothing is validated after that: `Adapted.accuracy` is None.
        training, tuning: of the first stage, and of the stage after compression; see `configure`.
            Single settings of training (epochs=, lr=, …) can be given directly. By default,
            ``Training("auto")`` chooses all settings that are not given, and a new domain that
            validates clearly worse than a linear head becomes that head (`Adapted.linear`).
        augment, progress: as for `fit`. augment="none" or "auto" is the setting of `Training`.
        snapshot: a folder for this run only. If the run is killed, the same call continues where it
            was, to the same bits on the CPU.
        keep_trained: keep a copy of the domain before compression in the result.
        further: train the A of an existing domain further before it is compressed, for new images.
        preprocessing: of a new domain; see `MultiDomainNetwork.add_domain`.
        options: options of the method, such as variance=, rank=, preset=; see `METHODS`. With
            dtype= ("float32", "float16", "int8", or "smallest" with max_drop=) a "covnorm" domain
            ends up exactly as its file in that precision holds it.

    "joint-svd" and "covnorm-joint" take a list of names, with loaders, classes and starts by name
    or in the same order, and return {name: Adapted}. With "covnorm-joint", a single name joins an
    existing basis.
    """
    check_single_process("cn.adapt")
    config = method
    if isinstance(augment, str):
        options, augment = {**options, "augment": augment}, None
    if isinstance(config, str):
        config = configure(config, options, training=training, tuning=tuning)
    elif training is not None or tuning is not None or options:
        raise CovNormError("a Config holds all settings: give it alone, or a method by its name")
    chosen = METHODS[config.method]
    names = [check_name(n) for n in ([name] if isinstance(name, str) else name)]
    if not names or (len(names) > 1 and not chosen.joint):
        raise CovNormError(f"method={config.method!r} takes one domain, not {names!r}")
    if start is not None and "adapter" not in chosen.options:
        raise CovNormError(
            f"start={start!r}: method {config.method!r} does not start from a trained A"
        )
    check_for(net, names, config)
    data = {"train": train, "val": val, "classes": classes, "start": start}
    data |= {"statistics": statistics, "test": test, "everything": everything}
    shared: dict[str, Any] = {"augment": augment, "progress": progress, "every": every}
    shared |= {"keeps_trained": keep_trained, "further": further, "preprocessing": preprocessing}
    new_run = partial(Run, net=net, config=config, **shared)
    runs = []
    for i, n in enumerate(names):
        part, folder = data, None if snapshot is None else Path(snapshot)
        if not isinstance(name, str):
            part = {k: _of(v, n, i, needed=k in ("train", "val")) for k, v in data.items()}
            folder = folder and folder / n
        part = {k: _loader(v, net, n, k) for k, v in part.items()}
        runs.append(new_run(name=n, snapshot=folder, **part))
        _check_same_run(runs[-1])
    with random_numbers_kept(next(net.backbone.parameters()).device), net.restoring_on_error(names):
        seed_all(config.training.seed, "adapt")
        chosen.recipe(runs if chosen.joint else runs[0])
        results = {run.name: run.finish() for run in runs}
    return results[names[0]] if isinstance(name, str) else results


def _loader(value: Any, net: MultiDomainNetwork, name: str, key: str) -> Any:
    """Return a loader of the data for a domain; classes and start as they are."""
    if key not in ("train", "val", "statistics", "test", "everything"):
        return value
    owner = net.domain(name) if name in net.domains else net.backbone  # which a new domain copies
    inputs = getattr(owner, "preprocessing", None)
    shuffle, labels = key in ("train", "everything"), key != "statistics"
    return as_loader(value, inputs, shuffle=shuffle, again=True, labels=labels)


def _of(values: Any, name: str, place: int, needed: bool) -> Any:
    """Return one domain's part of what was given for several: by name, or in their order."""
    if values is None or isinstance(values, int):
        return values
    if isinstance(values, Mapping):
        if needed and name not in values:
            raise CovNormError(f"domain {name!r} is missing in {sorted(values)}")
        return values.get(name)
    if not isinstance(values, list | tuple) or place >= len(values):
        raise CovNormError(
            f"domain {name!r}: got {type(values).__name__} with nothing for it: give a list with "
            "one entry per domain, or a dictionary by name"
        )
    return values[place]


def _check_same_run(run: Run) -> None:
    """Check that a snapshot's folder is used by one run: same method, start and settings."""
    if run.snapshot is None:
        return
    settings = {"domain": run.name, "start": run.start, "augment": plain(run.augment)}
    settings |= {"backbone": run.net.fingerprint, **run.config.record()}
    if run.start is not None:
        settings["start's A"] = digest(tensors_of(run.net.domain(run.start)))
    snapshot = Snapshot(run.snapshot / "run", settings)
    if snapshot.load() is None:
        snapshot.save({})
