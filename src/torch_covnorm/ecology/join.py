"""`join`: let domains of the store share one C and W; each keeps its own M."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compress.precision import PRECISIONS, round_, storage_of
from ..data.decode import Decoded
from ..data.loader import Batches
from ..errors import CovNormError
from ..methods.adapt import adapt
from ..methods.result import Adapted
from ..network.domain import check_name
from ..network.network import MultiDomainNetwork
from ..training.progress import Reporter
from ..training.seeds import random_numbers_kept
from . import measure
from .add import FULL, event
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
        for name in old:
            ecology.load(net, name)
        for name in new:
            ecology.load(net, name, trained="trained.record" in entries[name].blobs)
        whole = {n: copy.deepcopy(net.domain(n)) for n in new if entries[n].method in FULL}
        before = {name: entries[name] for name in [*old, *new]}
        parts: dict[str, Decoded] = {}
        done: dict[str, Adapted] = {}
        for some in (new, old):  # the old ones only if the basis has grown
            some = some if some is new or not new else _to_tune(done, old)
            if some:
                reporter.stage("decode", f"the images of {', '.join(some)}")
                parts |= {name: data(name) for name in some}
                made_from = {name: [parts[name].digest, before[name].blobs] for name in some}
                part = work / ("new" if some is new else "old")
                unfinished(part, {**config.record(), "made from": made_from})
                done |= _adapted(net, {n: parts[n] for n in some}, config, part, reporter)
        details, dtype = {}, PRECISIONS[config.dtype]
        for name, found in done.items():
            found.dtype = config.dtype
            found.storage = storage_of(net, name, _batches(net, name, parts[name], "val"))
            round_(net, name, dtype)
            kept = _details(ecology, net, name, parts[name], found, config, reporter)
            details[name] = replace(kept, trained=whole.get(name))
        ecology.put(net, details, dtype, replace=True, before=before)
    return {name: kept.facts for name, kept in details.items()}


def _chosen(
    ecology: Ecology, entries: Mapping[str, Entry], names: Sequence[str], old: Sequence[str]
) -> list[str]:
    """The domains that join the basis; without names, all that are in none."""
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


def _to_tune(done: Mapping[str, Adapted], old: Sequence[str]) -> list[str]:
    joined = next(iter(done.values())).joined
    return [n for n in old if joined is not None and n in joined.retune]


def _adapted(
    net: MultiDomainNetwork,
    parts: Mapping[str, Decoded],
    config: AddConfig,
    work: Path,
    reporter: Reporter,
) -> dict[str, Adapted]:
    def batches(split: str, size: int = 64, shuffle: bool = False) -> dict[str, Batches | None]:
        return {n: _batches(net, n, part, split, size, shuffle) for n, part in parts.items()}

    held_out = {n: _batches(net, n, p, measure.held_out(p)) for n, p in parts.items()}
    done: dict[str, Adapted] = adapt(
        net,
        list(parts),
        batches("train", config.batch, shuffle=True),
        batches("val"),
        config.run,
        statistics=batches("train"),
        test=held_out,
        augment=config.augment,
        progress=reporter.training,
        snapshot=work / "domains",
    )
    return done


def _batches(
    net: MultiDomainNetwork,
    name: str,
    data: Decoded,
    split: str,
    size: int = 64,
    shuffle: bool = False,
) -> Batches | None:
    images = data.splits.get(split)
    return images and Batches(images.x, images.y, preprocessing(net, name), size, shuffle)


def _details(
    ecology: Ecology,
    net: MultiDomainNetwork,
    name: str,
    data: Decoded,
    found: Adapted,
    config: AddConfig,
    reporter: Reporter,
) -> Details:
    """The domain's facts with its new results; everything else stored with it stays."""
    facts = ecology.details(name)
    split = measure.held_out(data)
    part = data.splits[split]
    reporter.stage("measure", f"{name} as stored, on {len(part.y):,} {split} images")
    measured, pictures, final = measure.predictions(net, name, part, data.classes)
    results = facts["results"]
    stages = {"compressed": found.tested.get("normalize"), "final": final}
    seconds = {**results["seconds"], **found.seconds}
    results |= {
        "accuracy": {**results["accuracy"], **stages},
        "on": split,
        **{k: v for k, v in found.record().items() if k != "forgetting"},
        **measured,
        "seconds": seconds,
        **measure.sizes(net, name, PRECISIONS[config.dtype]),
    }
    facts |= {"method": METHOD, "settings": config.record()}
    facts["history"] = [*facts["history"], event("join", METHOD, facts["results"])]
    return Details(facts, examples=pictures, keep_rest=True)
