"""The tables about the training: how long RA takes, and the learning rates that were tried."""

from __future__ import annotations

import statistics
from typing import Any

from .. import metric, rates
from . import stats
from .blocks import Table
from .metrics import WORDS
from .numbers import NONE, number, spread
from .rows import NAMES, Rows, bench, cell, cut, longer, said, start
from .tables import METHODS


def trained(found: Rows) -> Table:
    """Whether RA gains by more epochs, on validation."""
    lengths = (start("vgg16"), cell("vgg16", "ra"), longer("vgg16"))
    keys = {k["epochs"]: k for k in lengths}
    seeds = {e: found.values(k, "validation") for e, k in keys.items()}
    both = {d: set.intersection(*(set(values.get(d, {})) for values in seeds.values()))
            for d in found.domains}  # fmt: skip
    body = []
    for epochs, values in seeds.items():
        same = {d: {s: values[d][s] for s in both[d]} for d in found.domains if both[d]}
        cells = [spread(list(same.get(d, {}).values())) for d in found.domains]
        body.append([f"{epochs} epochs", *cells, spread(stats.over_seeds(same, found.domains))])
    caption = "RA on validation (accuracy in percent, VGG16, seeds that all have)."
    run = sum(bool(s) for s in both.values()), len(found.domains)
    return Table(caption, ["RA", *found.domains, "mean"], body, "vgg16",
                 [said(k) for k in keys.values()], run)  # fmt: skip


def again(found: Rows) -> Table | None:
    """Cells that were run twice with one seed."""
    rows = [r for r in found.all if r["method"] == "again"]
    body = [
        [r["backbone"], NAMES[r["of"]], r["domain"], f"{r['first']:.4f}", f"{r['accuracy']:.4f}"]
        for r in rows
    ]
    head = ["backbone", "method", "domain", "first", "again"]
    caption = (
        "Test accuracy in percent of the same cell with the same seed, run twice: "
        'the rows with `"method": "again"`.'
    )
    return Table(caption, head, body, left=range(3)) if rows else None


def tried(found: Rows, backbone: str) -> Table:
    """The learning rates that were tried, on validation; see `rates.run`."""
    body, keys, ends = [], [], []
    for name, asked in _searched().items():
        means: dict[float, float | None] = {}
        for lr in bench(backbone).rates(asked):
            of_lr = _keys(backbone, asked, lr)
            means[lr] = _searched_mean(found, of_lr)
            keys += of_lr
        known = [mean for mean in means.values() if mean is not None]
        if known:
            better = [f"{lr:g}" for lr, mean in means.items() if mean == max(known)]
            cells = [f"{lr:g}: {number(mean)}" for lr, mean in means.items()]
            used = f"{bench(backbone).rate(asked):g}"
            whole = len(known) == len(means)
            if whole and means[sorted(means)[1]] != max(known):
                ends.append(name)
            body.append([name, *cells, " or ".join(better) if whole else NONE, used])
    where = " and ".join(rates.SEARCH)
    caption = (
        f"Learning rates on {backbone}: mean validation accuracy in percent on {where}, seed 0, "
        "and the rate of all other results. Methods that start from a trained A are tuned at it; "
        "RA is that A. Small: at t = 0.9 or d/32, for t up to 0.95 and ranks up to d/16. Cuts: "
        "means over the shares."
    )
    if ends:
        at_ends = "; ".join(ends)
        caption += f" The best is at an end of the three, and there may be a better one: {at_ends}."
    head = ["method", "lowest rate", "middle", "highest", "best", "used"]
    return Table(caption, head, body, backbone, [said(k) for k in keys if found.of(k)])


def _searched() -> dict[str, str]:
    """{name: what `Bench.rate` knows it by} of all that has a search of its own."""
    kinds = [k for k in (*METHODS, *rates.OTHERS) if rates.searched(k)]
    names = {NAMES[k.removesuffix("-small")] + ", small" * k.endswith("-small"): k for k in kinds}
    return names | {f"cut: {WORDS[way]}": f"cut-{way}" for way in metric.TUNED}


def _keys(backbone: str, asked: str, lr: float) -> list[dict[str, Any]]:
    if asked == "ra":
        return [start(backbone, lr)]
    if asked.startswith("cut-"):
        way = asked.removeprefix("cut-")
        return [cut(backbone, way, share, True, lr) for share in metric.SHARES]
    method, options = rates.plain(asked)
    return [cell(backbone, method, options, lr=lr)]


def _searched_mean(found: Rows, keys: list[dict[str, Any]]) -> float | None:
    """Validation of the first seed, over the domains of the search; None before all are there."""
    values = [
        found.values(key, "validation").get(d, {}).get(0) for key in keys for d in rates.SEARCH
    ]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
