"""Accuracy against parameters: each method over its range of ranks, on two domains.

Also what M starts as: in closed form, as the identity, or random, before and after tuning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

import torch_covnorm as cn

from .bench import Bench
from .compare import Comparison, interval
from .keys import cell
from .rows import Rows

DOMAINS = ("objects", "sketches")
THRESHOLDS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
RATIOS = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)  # r = d/2^i, i = 2…6
CURVES = ("covnorm", "svd-fta", "fta", "pca-fta")
BOUNDS = ("ra", "fnft", "bn")
STARTS = ("closed-form", "identity", "random")
START_THRESHOLDS = (0.9, 0.99)


def cells() -> list[tuple[str, dict[str, Any]]]:
    """Return (method, options) of every point."""
    points: list[tuple[str, dict[str, Any]]] = [(method, {}) for method in BOUNDS]
    points += [(method, options) for method in CURVES for options in curve(method)]
    return points + [("covnorm", options) for options in starts() if "M" in options]


def curve(method: str) -> list[dict[str, Any]]:
    """Return the options of every point of a method's curve; points of Table 1 are its cells."""
    if method == "covnorm":
        return [{"variance": t} for t in THRESHOLDS]
    if method == "pca-fta":
        return [{"ratio": r} for r in RATIOS]
    usual = cn.METHODS[method].options["rank"]
    return [{} if r == usual else {"rank": r} for r in RATIOS]


def starts() -> list[dict[str, Any]]:
    """Return CovNorm's options for each start of M; the closed form is the default."""
    return [
        {"variance": t, **({} if M == "closed-form" else {"M": M})}
        for t in START_THRESHOLDS
        for M in STARTS
    ]


def curve_keys() -> list[dict[str, Any]]:
    """Return the keys of the figure's points."""
    return [cell("vgg16", method, options) for method, options in cells() if "M" not in options]


def start_keys() -> list[dict[str, Any]]:
    """Return the keys of CovNorm by its threshold and by what M starts as."""
    points = [*curve("covnorm"), *(options for options in starts() if "M" in options)]
    ordered = sorted(points, key=lambda options: options["variance"])
    return [cell("vgg16", "covnorm", options) for options in ordered]


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """Measure all points of these domains and seeds."""
    names = list(names)
    for seed in seeds:
        for method, options in cells():
            for domain in names:
                bench.cell(method, domain, seed, **options)


# ── results ──────────────────────────────────────────────────────────────────────────────────


def smallest_near_ra(rows: Rows, within: float) -> tuple[Comparison | None, float, str]:
    """Take CovNorm's smallest point that validates within so many points of RA, else its best.

    Return how it compares with RA on test images, its mean share of RA's parameters, and the
    thresholds in words.
    """
    ra, points = cell("vgg16", "ra"), [cell("vgg16", "covnorm", o) for o in curve("covnorm")]
    rows, gains, parts, chosen = rows.common(ra, *points), {}, [], []
    for (domain, seed), whole in sorted(rows.of(ra).items(), key=lambda item: item[0]):
        if domain in DOMAINS:
            tried = [rows.of(key)[domain, seed] for key in points]
            near = [row for row in tried if row["validation"] >= whole["validation"] - within]
            best = max(tried, key=lambda row: row["validation"])
            taken = min(near, key=lambda row: row["parameters"], default=best)
            gains.setdefault(domain, []).append(taken["accuracy"] - whole["accuracy"])
            parts.append(taken["parameters"] / whole["parameters"])
            chosen.append(f"t = {taken['options']['variance']:g} on {domain}")
    pair = interval([statistics.fmean(of_seeds) for of_seeds in gains.values()])
    return pair, statistics.fmean(parts) if parts else math.nan, ", ".join(chosen)


def above_curve(rows: Rows, other: str) -> tuple[Comparison | None, int]:
    """Compare CovNorm's points with another method's curve at equal parameters.

    The curve is linear between its points in the logarithm of parameters. Also return how many of
    CovNorm's points lie within the curve's range.
    """
    ours, theirs = ([cell("vgg16", m, o) for o in curve(m)] for m in ("covnorm", other))
    rows, gains, used = rows.common(*ours, *theirs), {}, 0

    def points(keys: list[dict[str, Any]], place: tuple[str, int]) -> list[tuple[float, float]]:
        found = [rows.of(key)[place] for key in keys]
        return sorted((math.log(row["parameters"]), row["accuracy"]) for row in found)

    for place in rows.of(ours[0]):
        x, y = zip(*points(theirs, place), strict=True)
        inside = [(size, a) for size, a in points(ours, place) if x[0] <= size <= x[-1]]
        if inside and place[0] in DOMAINS:
            used += len(inside)
            above = [float(a - np.interp(size, x, y)) for size, a in inside]
            gains.setdefault(place[0], []).append(statistics.fmean(above))
    return interval([statistics.fmean(of_seeds) for of_seeds in gains.values()]), used
