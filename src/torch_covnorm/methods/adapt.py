"""`adapt`: a domain by any method, in one call."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..compress.joint import Joined
from ..errors import CovNormError
from ..network.domain import check_name
from ..network.network import MultiDomainNetwork
from ..records import digest
from ..stats.moments import Moments
from ..training.progress import Report
from ..training.schedules import Training, plain
from ..training.seeds import random_numbers_kept, seed_all
from ..training.snapshot import Snapshot, tensors_of
from .recipes import METHODS
from .run import Run
from .settings import check_for, settings_of


@dataclass(frozen=True)
class Adapted:
    """What `adapt` did.

    accuracy: on the validation data, in percent; None without them. `stages`: the same after each
        stage, `tested`: on the test data, where they were given.
    parameters: as `MultiDomainNetwork.num_parameters`; `account` tells more.
    moments: of A's input by site, where the method collects them.
    predicted: for metric="loss", the loss that the compression costs, with its standard error.
    declined: tuning validated worse than what it started from, which was kept.
    dtype: of covnorm, the precision that its numbers are rounded to; None: as they were trained.
        `storage`: {precision: {"bytes", "accuracy"}}, what each would cost, validated.
    forgetting: for lwf. joined: for covnorm-joint, with the variance that the basis captures.
    """

    domain: str
    method: str
    accuracy: float | None
    parameters: dict[str, int]
    stages: dict[str, float | None]
    seconds: dict[str, float]
    ranks: dict[str, Any]
    forgetting: dict[str, float] | None = None
    joined: Joined | None = None
    tested: dict[str, float | None] = field(default_factory=dict)
    moments: dict[str, Moments] | None = None
    predicted: dict[str, float | None] | None = None
    declined: bool = False
    dtype: str | None = None
    storage: dict[str, dict[str, Any]] | None = None


def adapt(
    net: MultiDomainNetwork,
    name: str | Sequence[str],
    train: Any,
    val: Any = None,
    method: str = "covnorm",
    *,
    classes: Any = None,
    start: Any = None,
    statistics: Any = None,
    test: Any = None,
    training: Training | str | None = None,
    tuning: Training | Mapping[str, Any] | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
    progress: bool | Report | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    every: float = 20.0,
    **options: Any,
) -> Any:
    """Adapt the network to a domain by any method of `METHODS`; returns an `Adapted`.

    Args:
        name: the domain, added where it does not exist. An existing one goes on from where it is:
            a method that compresses takes its trained A.
        train, val: loaders of (images, labels); `val` chooses the best epoch, so no test data.
        classes: names, or how many; else the labels that the loader shows.
        start: another domain, trained by "ra", "parallel" or "dan", whose A to start from: it is
            copied, so that it is trained once and shared by methods.
        statistics: a loader of the training images un-augmented, for the moments, where `train`
            yields augmented ones. (What `augment=` does is not in the moments.)
        test: a loader that is measured after every stage and decides nothing.
        training: of the first stage, a `Training` or the name of one; single settings (epochs=,
            lr=, …) may be given as they are.
        tuning: of the stage behind the compression: changes to `training`, by default a third of
            its rate and half of its epochs (with preset="paper" as `training`, with
            "official-code" a tenth of the rate).
        augment, progress: as for `fit`.
        snapshot: a folder for this run alone: killed and called again, it goes on where it was, to
            the same bits on the CPU.
        options: settings of the method, such as variance=, rank=, preset=; see `METHODS`. With
            dtype= ("float32", "float16", "int8", or "smallest" with max_drop=) a domain of
            "covnorm" ends as its file in that precision has it.

    "joint-svd" and "covnorm-joint" take a list of names, with loaders, classes and starts by name
    or in the same order, and return {name: Adapted}; with "covnorm-joint" one name joins an
    existing basis.
    """
    own, first, second = settings_of(method, training, tuning, options)
    chosen = METHODS[method]
    names = [check_name(n) for n in ([name] if isinstance(name, str) else name)]
    if not names or (len(names) > 1 and not chosen.joint):
        raise CovNormError(f"method={method!r} takes one domain, not {names!r}")
    if start is not None and "adapter" not in chosen.options:
        raise CovNormError(f"start={start!r}: {method!r} does not start from a trained A")
    check_for(net, names, own)
    folder = None if snapshot is None else Path(snapshot)
    runs = []
    for i, n in enumerate(names):
        loaders, others = (train, val), (classes, start, statistics, test)
        if not isinstance(name, str):
            loaders = tuple(_of(v, n, i, needed=True) for v in loaders)
            others = tuple(_of(v, n, i, needed=False) for v in others)
        part = folder if folder is None or isinstance(name, str) else folder / n
        run = Run(net, n, *loaders, own, first, second, *others, augment, progress, part, every)
        _check_same_run(run, method, first)
        runs.append(run)
    with random_numbers_kept(next(net.backbone.parameters()).device), _undone_on_error(net, names):
        seed_all(first.seed, "adapt")
        chosen.recipe(runs if chosen.joint else runs[0])
        for run in runs:
            run.note("final")
    results = {run.name: _result(run, method) for run in runs}
    return results[names[0]] if isinstance(name, str) else results


def _result(run: Run, method: str) -> Adapted:
    return Adapted(
        run.name,
        method,
        run.stages.get("final"),
        run.net.num_parameters(run.name),
        run.stages,
        run.seconds,
        run.ranks,
        run.forgetting,
        run.joined,
        run.tested,
        run.moments,
        run.predicted,
        run.declined,
        run.dtype,
        run.storage,
    )


@contextlib.contextmanager
def _undone_on_error(net: MultiDomainNetwork, names: Sequence[str]) -> Iterator[None]:
    """What fails or is interrupted inside leaves the domains and bases as they were.

    So the same call can be made again, and goes on from its snapshot.
    """
    known, bases = set(net.domains), dict(net.bases.items())
    copies = {n: copy.deepcopy(d) for n, d in net.domains.items() if n in names}
    members = [d for n, d in net.domains.items() if d.basis and n not in names]
    maps = [(a, a.A) for d in members for _, a in d.adapters.items()]
    try:
        yield
    except BaseException:
        for name in set(net.domains) - known:
            net.remove_domain(name)
        for name in net.bases:
            del net.bases[name]
        for name, basis in bases.items():
            net.bases[name] = basis
        for name, domain in copies.items():
            net.domains[name] = domain
        for adapter, A in maps:
            adapter.A = A
        raise


def _of(values: Any, name: str, place: int, needed: bool) -> Any:
    """One domain's part of what was given for several: by name, or in their order."""
    if values is None or isinstance(values, int):
        return values
    if isinstance(values, Mapping):
        if needed and name not in values:
            raise CovNormError(f"nothing for domain {name!r} in {sorted(values)}")
        return values.get(name)
    if not isinstance(values, list | tuple) or place >= len(values):
        raise CovNormError(
            f"domain {name!r}: nothing for it in {type(values).__name__}: give a list with one for "
            "each domain, or a dictionary by name"
        )
    return values[place]


def _check_same_run(run: Run, method: str, training: Training) -> None:
    """A snapshot's folder is for one run: the same method, start and settings."""
    if run.snapshot is None:
        return
    settings = {"method": method, "domain": run.name, "start": run.start}
    settings |= {"backbone": run.net.fingerprint, "augment": plain(run.augment)}
    if run.start is not None:
        settings["start's A"] = digest(tensors_of(run.net.domain(run.start)))
    snapshot = Snapshot(run.snapshot / "run", settings | plain(run.options) | training.record())
    if snapshot.load() is None:
        snapshot.save({})
