"""`join`: let domains of the store share one C and W; each keeps its own M."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compress.precision import PRECISIONS
from ..data.decode import Decoded
from ..errors import CovNormError
from ..methods.adapt import adapt
from ..methods.result import Adapted
from ..network.domain import check_name
from ..training.progress import Reporter
from ..training.seeds import random_numbers_kept
from . import measure
from .add import FULL
from .config import AddConfig, add_config
from .manifest import Entry
from .prediction import preprocessing
from .store import Details, Ecology
from .work import unfinished, workplace

METHOD = "covnorm-joint"


def join(
    ecology: Ecology,
    names: Sequence[str],
    data: Callable[[str], Decoded],
    config: AddConfig | None = None,
    *,
    fresh: bool = False,
    backbone: nn.Module | None = None,
    device: str | torch.device = "cpu",
    reporter: Reporter | None = None,
) -> dict[str, dict[str, Any]]:
    """Join domains in one basis, tune each M on its own images and store them: {name: details}.

    Domains join with the full A's that the store keeps. If the basis already exists, they join it;
    if it then has to grow, the M's of its other domains are tuned again on their images. Without
    new domains, all domains of the basis are tuned again. Everything is stored in one step.

    Args:
        names: domains with trained A's; empty: all that have them and are in no basis.
        data: returns the decoded images of a domain, by its name.
        config: from `add_config("covnorm-joint", …)`.
    """
    config, reporter = config or add_config(METHOD), reporter or Reporter()
    basis = check_name(config.run.options["basis"])
    entries = ecology.domains
    old = [n for n, entry in entries.items() if entry.basis == basis]
    new = _chosen(ecology, entries, names, old)
    busy = f"{ecology.folder}: another process is joining basis {basis!r}: wait until it is done"
    place = ecology.folder / "work" / "bases" / basis
    with workplace(place, busy, fresh) as work, random_numbers_kept():
        net = ecology.network(backbone).to(device)
        for name in [*old, *new]:
            trained = name in new and "trained.record" in entries[name].blobs
            ecology.load(net, name, trained=trained)
        whole = {n: copy.deepcopy(net.domain(n)) for n in new if entries[n].method in FULL}
        before = {name: entries[name] for name in [*old, *new]}
        images: dict[str, Decoded] = {}
        loaders: dict[str, dict[str, Any]] = {}
        runs: dict[str, Adapted] = {}
        for part, some in (("new", new), ("old", old)):
            if part == "old" and new:  # only those that the grown basis changes
                joined = runs[new[0]].joined
                some = [n for n in old if joined is not None and n in joined.retune]
            if not some:
                continue
            reporter.stage("decode", f"the images of {', '.join(some)}")
            for name in some:
                images[name] = data(name)
                inputs = preprocessing(net, name)
                loaders[name] = measure.loaders(images[name], inputs, config.batch)
            made_from = {name: [images[name].digest, before[name].blobs] for name in some}
            unfinished(work / part, {**config.record(), "made from": made_from})
            by_name: Any = {key: {n: loaders[n][key] for n in some} for key in measure.LOADERS}
            runs |= adapt(
                net,
                some,
                method=config.run,
                augment=config.augment,
                progress=reporter.training,
                snapshot=work / part / "domains",
                **by_name,
            )
        details = {}
        for name, run in runs.items():
            facts, val = ecology.details(name), loaders[name]["val"]
            results, examples = measure.finish_(
                net, run, images[name], val, config.dtype, facts["results"], reporter
            )
            facts = measure.facts_after("join", config.record(), results, facts)
            details[name] = Details(
                facts, trained=whole.get(name), examples=examples, keep_rest=True
            )
        ecology.put(net, details, PRECISIONS[config.dtype], replace=True, before=before)
    return {name: kept.facts for name, kept in details.items()}


def _chosen(
    ecology: Ecology, entries: Mapping[str, Entry], names: Sequence[str], old: Sequence[str]
) -> list[str]:
    able = [n for n, e in entries.items() if e.method in FULL or "trained.record" in e.blobs]
    free = [n for n in able if entries[n].basis is None]
    new = [n for n in dict.fromkeys(names or free) if n not in old]
    if lost := [n for n in new if n not in able]:
        method = ecology.entry(lost[0]).method
        raise CovNormError(
            f"domain {lost[0]!r} was made by {method!r} and has no trained A to join: add it with "
            "method 'covnorm' or 'ra'"
        )
    if len(new) + len(old) < 2:
        raise CovNormError(f"{ecology.folder}: joining needs at least two domains with trained A's")
    return new
