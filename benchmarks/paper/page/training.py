"""The tables about the training: how long RA takes, and the learning rates that were tried."""

from __future__ import annotations

import torch_covnorm as cn

from .. import rates, table1
from . import stats
from .blocks import Table
from .numbers import NONE, spread
from .rows import NAMES, Rows, bench, cell, longer, said
from .tables import METHODS


def trained(found: Rows) -> Table:
    """Whether RA gains by twice the epochs, on validation."""
    keys = {k["epochs"]: k for k in (cell("vgg16", "ra"), longer("vgg16"))}
    seeds = {e: found.values(k, "validation") for e, k in keys.items()}
    both = {d: seeds[min(seeds)].get(d, {}).keys() & seeds[max(seeds)].get(d, {}).keys()
            for d in found.domains}  # fmt: skip
    body = []
    for epochs, values in seeds.items():
        same = {d: {s: values[d][s] for s in both[d]} for d in found.domains if both[d]}
        cells = [spread(list(same.get(d, {}).values())) for d in found.domains]
        body.append([f"{epochs} epochs", *cells, spread(stats.over_seeds(same, found.domains))])
    caption = "RA on validation (accuracy in percent, VGG16, seeds that both have)."
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
    body, keys = [], []
    for method in METHODS:
        if cn.METHODS[method].joint or method == "svd":
            continue
        options, means = table1.OPTIONS.get(method, {}), {}
        for lr in bench(backbone).rates(method):
            keys.append(cell(backbone, method, options, lr=lr))
            values = found.values(keys[-1], "validation")
            first = {d: {0: v[0]} for d, v in values.items() if 0 in v}
            means[lr] = stats.over_seeds(first, rates.SEARCH)
        if any(means.values()):
            best = max(means.values())
            better = [f"{lr:g}" for lr, mean in means.items() if mean == best]
            cells = [f"{lr:g}: {spread(mean)}" for lr, mean in means.items()]
            used = f"{bench(backbone).rate(method):g}"
            whole = all(means.values())
            body.append([NAMES[method], *cells, " or ".join(better) if whole else NONE, used])
    where = " and ".join(rates.SEARCH)
    caption = (
        f"Learning rates on {backbone}: mean validation accuracy in percent on {where}, seed 0, "
        "and the rate of all other results. Methods that start from a trained A are tuned at it."
    )
    head = ["method", "lowest rate", "middle", "highest", "best", "used"]
    return Table(caption, head, body, backbone, [said(k) for k in keys if found.of(k)])
