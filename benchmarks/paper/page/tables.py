"""The paper's tables from rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from .. import parameters
from .. import table1 as first_table
from ..profiles import SEEDS
from ..published import DATASETS, TABLE1
from ..settings import EPOCHS, PIXELS
from . import stats
from .blocks import Table
from .numbers import NONE, number, share, spread, whole_number
from .rows import NAMES, Row, Rows, adapters, cell, said, start

METHODS = tuple(m for m in NAMES if m in (*first_table.SEVERAL, *first_table.ONE))


def table1(rows: Iterable[Row], domains: Sequence[str]) -> str:
    """Table 1 of the methods that have rows, in Markdown: accuracies, then sizes."""
    found = Rows(rows, domains)
    methods = [m for m in METHODS if found.of(key1(found, m))]
    have = sum(len({domain for domain, _ in found.of(key1(found, m))}) for m in methods)
    run = (have, len(methods) * len(found.domains))  # with one seed at least
    accuracies = replace(first(found, methods), made_of=(), run=run)
    return f"{accuracies.markdown()}\n\n{replace(sizes(found, methods), made_of=()).markdown()}"


def key1(found: Rows, method: str) -> dict[str, Any]:
    """The key of a method in Table 1."""
    options = first_table.options(method, len(found.domains))
    return cell("vgg16", method, options, domains=len(found.domains))


def first(found: Rows, methods: Sequence[str] = METHODS) -> Table:
    """Table 1: every method on every domain."""
    body, whole = [], adapters(found, "vgg16")
    several = sum(len(SEEDS) if m in first_table.SEVERAL else 1 for m in methods)
    keys = {m: key1(found, m) for m in methods}
    run = (found.count(keys.values()), several * len(found.domains))
    original = all(d in DATASETS for d in found.domains)
    # What CovNorm's A has, by CovNorm's own rows: an A that was lost was trained again.
    started = found.values(key1(found, "covnorm"), "tested", "train")
    for method, key in ({"A": start("vgg16")} | keys).items():
        values = started if method == "A" else found.values(key)
        seeds = {s for of_seeds in values.values() for s in of_seeds}
        theirs = published(method, found.domains) if original else {}
        body.append(
            [
                NAMES.get(method, method),
                *(spread(list(values.get(d, {}).values())) + theirs.get(d, "")
                  for d in found.domains),
                spread(stats.over_seeds(values, found.domains)),
                theirs.get("mean", NONE) if original else _mean_of_seven(method),
                share(found.mean(key, "parameters"), whole),
                str(len(seeds) or NONE),
            ]
        )  # fmt: skip
    beside = (
        f"In brackets the paper's, whose images are larger than these of {PIXELS['vgg16']} px."
        if original
        else "**Published means are of other data**, the paper's seven datasets: for the order, no "
        "more."
    )
    caption = (
        "Table 1. Test accuracy in percent, VGG16; ± is the standard deviation over seeds. "
        f"{beside} A is RA after {EPOCHS} epochs, which the compressed methods start from: what it "
        "has as CovNorm starts. CovNorm's M starts in closed form, which is ours and not the "
        "paper's."
    )
    of = "published mean" + " (other data)" * (not original)
    end = ("mean", of, "parameters, of RA's", "seeds")
    rows_of = [said(k) for k in keys.values()]
    return Table(caption, ["method", *found.domains, *end], body, "vgg16", rows_of, run)


def published(method: str, datasets: Sequence[str]) -> dict[str, str]:
    """The paper's accuracies of some of its datasets, in brackets, and their mean."""
    if method not in TABLE1:
        return {}
    by_name = dict(zip(DATASETS, TABLE1[method][0], strict=True))
    mean = statistics.fmean(by_name[d] for d in datasets)
    return {d: f" ({by_name[d]:.1f})" for d in datasets} | {"mean": number(mean)}


def _mean_of_seven(method: str) -> str:
    return number(TABLE1[method][1]) if method in TABLE1 else NONE


def sizes(found: Rows, methods: Sequence[str] = METHODS) -> Table:
    """What a domain of each method of Table 1 costs."""
    whole, network = adapters(found, "vgg16"), network_of(found)
    body = []
    for method in methods:
        key = key1(found, method)
        size = found.mean(key, "parameters")
        published = f"{TABLE1[method][2]:g} %" if method in TABLE1 else NONE
        shares = (share(size, whole), share(size, network), published)
        body.append([NAMES[method], whole_number(size), *shares,
                     whole_number(found.mean(key, "total"))])  # fmt: skip
    caption = (
        "Parameters of Table 1, means over the domains. First the matrices alone, as the paper "
        "counts, and what they are of RA's and of the network's; then all that a domain ships, "
        "with norms, biases and head. What domains share is counted in equal parts."
    )
    head = ["method", "adapter parameters", "of RA's", "of the network's"]
    end = ["published, of the network's", "all parameters"]
    rows_of = [said(key1(found, m)) for m in methods]
    return Table(caption, [*head, *end], body, "vgg16", rows_of)


def starts(found: Rows) -> Table:
    """M in closed form, as the identity, random; as it comes and tuned."""
    domains = [d for d in parameters.DOMAINS if d in found.domains]
    first = [r for r in found.all if r["seed"] == SEEDS[0]]
    found, body, keys = Rows(first, domains), [], []
    whole = adapters(found, "vgg16")
    closed = [{"variance": t} for t in parameters.THRESHOLDS]
    others = [options for options in parameters.starts() if "M" in options]
    for options in sorted([*closed, *others], key=lambda o: o["variance"]):
        keys.append(cell("vgg16", "covnorm", options))
        both = [found.values(keys[-1], "tested", stage) for stage in ("normalize", "final")]
        body.append(
            [
                f"t = {options['variance']}",
                options.get("M", "closed-form").replace("-", " "),
                *(spread(list(v.get(d, {}).values())) for d in domains for v in both),
                *(spread(stats.over_seeds(v, domains)) for v in both),
                share(found.mean(keys[-1], "parameters"), whole),
            ]
        )
    stages = ("not tuned", "tuned")
    columns = [f"{d}, {s}" for d in (*domains, "mean") for s in stages]
    caption = (
        "CovNorm by what M starts as. Test accuracy in percent, VGG16, seed 0; each start is tuned "
        "for as many epochs, at the best rate of a search of its own."
    )
    head = ["threshold", "M", *columns, "of RA's parameters"]
    rows_of = [said(k) for k in keys]
    return Table(
        caption, head, body, "vgg16", rows_of, (found.count(keys), len(keys) * len(domains)), (0, 1)
    )


def network_of(found: Rows, backbone: str = "vgg16") -> float | None:
    """Parameters of the network, from what RA's rows say that they are a share of."""
    rows = [r for k in (start(backbone), cell(backbone, "ra")) for r in found.of(k).values()]
    return rows[0]["parameters"] / rows[0]["of_network"] if rows else None
