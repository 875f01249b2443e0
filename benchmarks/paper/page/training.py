"""The tables about the training: how long RA takes, and the learning rates that were tried."""

from __future__ import annotations

import statistics
from typing import Any

from .. import metric, rates, settings
from . import stats
from .blocks import Table
from .metrics import WORDS
from .numbers import NONE, number, spread
from .rows import NAMES, Rows, cell, cut, longer, said, start


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
        [
            *(r["backbone"], NAMES[r["of"]], r["domain"]),
            *(f"{r[run]:.4f}" for run in ("first", "accuracy")),
            "the same" if r["accuracy"] == r["first"] else "**not the same**",
        ]
        for r in rows
    ]
    head = ["backbone", "method", "domain", "first", "again", ""]
    caption = (
        "Test accuracy in percent of the same cell with the same seed, run twice: "
        'the rows with `"method": "again"`.'
    )
    return Table(caption, head, body, left=(0, 1, 2, 5)) if rows else None


def tried(found: Rows, backbone: str) -> Table | None:
    """The learning rates that were tried, on validation; see `rates.run`."""
    body, keys, ends = [], [], []
    for name, asked in _searched(backbone).items():
        grid = settings.rates(backbone, asked)
        values = {lr: _validated(found, backbone, asked, lr) for lr in grid}
        keys += [key for lr in grid for key in _keys(backbone, asked, lr)]
        known = {lr: v for lr, v in values.items() if v.keys() >= {*rates.two(backbone)}}
        if not known:
            continue
        near = [] if asked.startswith("cut-") else rates.close(known)
        whole = len(known) == len(grid) and all(rates.FURTHER in known[lr] for lr in near)
        best = rates.best(known) if whole else []
        if best and {*best} <= {grid[0], grid[-1]}:
            ends.append(name)
        cells = "; ".join(
            _said(lr, known.get(lr), lr in near) + _undone(found, backbone, asked, lr)
            for lr in grid
        )
        said_best = " or ".join(f"{lr:g}" for lr in best) or NONE
        body.append([name, cells, said_best, f"{settings.rate(backbone, asked):g}"])
    where = " and ".join(rates.two(backbone))
    caption = (
        f"Learning rates on {backbone}: mean validation accuracy in percent on {where}, seed 0, "
        f"and the rate of all other results. Where rates are less than {rates.TIE} apart there, "
        f"{rates.FURTHER} are asked as well, and the mean of the three decides (cuts: the two "
        "alone). Methods that start from a trained A are tuned at it; RA is that A. Undone: "
        "tuning validated clearly worse than what it started from, and that is what is shown. "
        "Cuts: means over the shares."
    )
    if any(" or " in line[2] for line in body):
        caption += (
            " Of equal ones that which was better in a first search, from other A's, is used: its "
            "rows are at commit abf4578."
        )
    if any(kind.endswith(settings.SMALL) for kind in _searched(backbone).values()):
        caption += f" Small: {_small()}."
    if ends:
        at_ends = "; ".join(ends)
        caption += f" The best is at an end, and there may be a better one: {at_ends}."
    head = ["method", "rate: accuracy", "best", "used"]
    made_of = [said(k) for k in keys if found.of(k)]
    return Table(caption, head, body, backbone, made_of, left=(0, 1)) if body else None


def _said(lr: float, validated: dict[str, float] | None, near: bool) -> str:
    mean = None if validated is None else rates.mean(validated)
    further = f" ({rates.FURTHER} {number((validated or {}).get(rates.FURTHER))})" if near else ""
    return f"{lr:g}: {number(mean)}{further}"


def _undone(found: Rows, backbone: str, asked: str, lr: float) -> str:
    """On which domains of the search tuning at a rate was undone."""
    declined = [found.values(key, "declined") for key in _keys(backbone, asked, lr)]
    where = [d for d in rates.two(backbone) if any(v.get(d, {}).get(0) for v in declined)]
    return f" (undone on {' and '.join(where)})" if where else ""


def _searched(backbone: str) -> dict[str, str]:
    """{name: what `settings.rate` knows it by} of all that has a search of its own."""
    small = settings.SMALL
    names = {k: n for m, n in NAMES.items() for k, n in ((m, n), (m + small, f"{n}, small"))}
    kinds = {n: k for k, n in names.items() if k in rates.kinds(backbone)}
    cuts = metric.TUNED if backbone != "resnet26" else ()
    return kinds | {f"cut: {WORDS[way]}": f"cut-{way}" for way in cuts}


def _small() -> str:
    """Which point of its curve a small kind was searched at, and which points have its rate."""
    t, ratio = rates.SMALLER["covnorm"]["variance"], rates.SMALLER["fta"]["rank"]
    return (
        f"t up to {settings.SMALL_VARIANCE:g}, searched at {t:g}, and ranks up to "
        f"d/{1 / settings.SMALL_RANK:g}, searched at d/{1 / ratio:g}"
    )


def _keys(backbone: str, asked: str, lr: float) -> list[dict[str, Any]]:
    if asked == "ra":
        return [start(backbone, lr)]
    if asked.startswith("cut-"):
        way = asked.removeprefix("cut-")
        return [cut(backbone, way, share, True, lr) for share in metric.SHARES]
    method, options = rates.plain(asked)
    return [cell(backbone, method, options, lr=lr)]


def _validated(found: Rows, backbone: str, asked: str, lr: float) -> dict[str, float]:
    """{domain of the search: validation of the first seed}, of those that have all of it."""
    by_key = [found.values(key, "validation") for key in _keys(backbone, asked, lr)]
    further = () if asked.startswith("cut-") else (rates.FURTHER,)
    wanted = (*rates.two(backbone), *further)
    domains = [d for d in wanted if all(0 in v.get(d, {}) for v in by_key)]
    return {d: statistics.fmean(v[d][0] for v in by_key) for d in domains}
