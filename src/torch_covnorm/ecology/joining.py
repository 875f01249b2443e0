"""`join`: domains of the store come to share one C and W; each keeps an M of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..adapt import Adapted, adapt
from ..data.decode import Decoded
from ..data.loader import Batches
from ..domain import check_name
from ..errors import CovNormError
from ..network import MultiDomainNetwork
from ..prediction import preprocessing, probabilities
from ..progress import Telling
from ..seeds import random_numbers_kept
from . import measure
from .adding import FULL, How, event
from .store import Details, Ecology
from .work import unfinished, workplace

METHOD = "covnorm-joint"


def join(
    ecology: Ecology,
    names: Sequence[str],
    data: Callable[[str], Decoded],
    how: How | None = None,
    *,
    fresh: bool = False,
    backbone: nn.Module | None = None,
    device: str | torch.device = "cpu",
    tell: Telling | None = None,
) -> dict[str, dict[str, Any]]:
    """Join domains in one basis, tune each M on its own images, and keep them: {name: details}.

    Domains come with the full A's that the store keeps. Where the basis exists already, its domains
    go along: should it have to grow, their M's change too. All is stored in one step.

    Args:
        names: domains with trained A's; none: every one that has them.
        data: the decoded images of a domain by its name.
        how: "variance", "basis" and other options of `METHODS["covnorm-joint"]`, and training.
    """
    how, tell = how or How(METHOD), tell or Telling()
    basis = check_name(how.options.get("basis", "joint"))
    entries = ecology.domains
    old = [n for n, entry in entries.items() if entry.basis == basis]
    able = [n for n, e in entries.items() if e.method in FULL or "trained.record" in e.blobs]
    names = [n for n in (names or able) if n not in old]
    if lost := [n for n in names if n not in able]:
        ecology.entry(lost[0])
        raise CovNormError(
            f"domain {lost[0]!r} was made by {entries[lost[0]].method!r} and has no trained A to "
            "join: add it by 'covnorm' or 'ra'"
        )
    if len(names) + len(old) < 2:
        raise CovNormError(f"{ecology.folder}: two domains with trained A's can join, not fewer")
    busy = f"{ecology.folder}: basis {basis!r} is being joined by another process: wait for it"
    place = ecology.folder / "work" / "bases" / basis
    with workplace(place, busy, fresh) as work, random_numbers_kept():
        net = ecology.network(backbone).to(device)
        for name in old:
            ecology.load(net, name)
        for name in names:
            ecology.load(net, name, trained="trained.record" in entries[name].blobs)
        tell.stage("decode", "the images of all of them, from the cache where they are in it")
        parts = {name: data(name) for name in [*old, *names]}
        digests = {name: part.digest for name, part in parts.items()}
        before = {name: entries[name] for name in parts}
        made_from = {name: entry.blobs for name, entry in before.items()}
        unfinished(work, {**how.record(), "data": digests, "domains": made_from})
        done = _adapted(net, parts, how, work, tell)
        for name in done:
            measure.round_(net, name, how.storage)
        details = {
            name: _details(ecology, net, name, parts[name], found, how, tell)
            for name, found in done.items()
        }
        ecology.put(net, details, how.storage, replace=True, before=before)
    return {name: kept.facts for name, kept in details.items()}


def _adapted(
    net: MultiDomainNetwork, parts: Mapping[str, Decoded], how: How, work: Any, tell: Telling
) -> dict[str, Adapted]:
    def batches(split: str, shuffle: bool = False) -> dict[str, Batches | None]:
        found: dict[str, Batches | None] = {}
        for name, part in parts.items():
            images = part.splits.get(split)
            inputs, size = preprocessing(net, name), how.batch if shuffle else 64
            found[name] = images and Batches(images.x, images.y, inputs, size, shuffle)
        return found

    held_out = {n: batches(measure.held_out(part))[n] for n, part in parts.items()}
    done: dict[str, Adapted] = adapt(
        net,
        list(parts),
        batches("train", shuffle=True),
        batches("val"),
        METHOD,
        statistics=batches("train"),
        test=held_out,
        augment=how.augment,
        progress=tell.training,
        snapshot=work / "domains",
        seed=how.seed,
        **how.options,
    )
    return done


def _details(
    ecology: Ecology,
    net: MultiDomainNetwork,
    name: str,
    data: Decoded,
    found: Adapted,
    how: How,
    tell: Telling,
) -> Details:
    """The domain's facts with its new results; what else is kept of it stays."""
    facts = ecology.details(name)
    split = measure.held_out(data)
    part = data.splits[split]
    tell.stage("measure", f"{name} as it is stored, on {len(part.y):,} images: {split}")
    answers = probabilities(net, name, part.x)
    said, pictures = measure.examples(part.x, part.y, answers, data.classes)
    right = measure.percent(answers.argmax(1) == part.y)
    stages = {"compressed": found.tested.get("normalize"), "final": right}
    facts["results"] |= {
        "accuracy": {**facts["results"]["accuracy"], **stages},
        "on": split,
        "validation": found.accuracy,
        "ranks": {site: list(pair) for site, pair in found.ranks.items()},
        "seconds": {**facts["results"]["seconds"], **found.seconds},
        "confusion": measure.confusion(part.y, answers.argmax(1), len(data.classes)),
        "examples": said,
        "dtype": how.dtype,
        **measure.sizes(net, name, how.storage),
    }
    facts |= {"method": METHOD, "settings": how.record()}
    facts["history"] = [*facts["history"], event("join", METHOD, facts["results"])]
    return Details(facts, examples=pictures, keep=True)
