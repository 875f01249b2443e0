"""CovNorm's curve over its threshold t against RA, and against the curves of other methods."""

from __future__ import annotations

import math
import statistics

import numpy as np

from .. import parameters
from . import stats
from .rows import Row, Rows, cell

Place = tuple[str, int]


def _points(found: Rows, method: str) -> list[dict[Place, Row]]:
    """The rows of every point of a method's curve, by domain and seed."""
    return [found.of(cell("vgg16", method, options)) for options in parameters.curve(method)]


def _whole(*curves: list[dict[Place, Row]]) -> list[Place]:
    """The domains of the figure, with a seed, that have every point."""
    places = set.intersection(*(set(point) for curve in curves for point in curve))
    return sorted(place for place in places if place[0] in parameters.DOMAINS)


def chosen(found: Rows, within: float) -> tuple[stats.Comparison | None, float, str]:
    """CovNorm at the t of fewest parameters that validates within so many points of RA.

    Where there is none, at the t that validates best. Returns the comparison with RA on test, the
    mean share of RA's parameters, and what was chosen.
    """
    ours: dict[str, dict[int, float]] = {}
    theirs: dict[str, dict[int, float]] = {}
    sizes, picked = [], []
    curve = _points(found, "covnorm")
    ra = found.of(cell("vgg16", "ra"))
    for domain, seed in _whole(curve, [ra]):
        whole, points = ra[domain, seed], [point[domain, seed] for point in curve]
        enough = [p for p in points if p["validation"] >= whole["validation"] - within]
        fewest = min(enough, key=lambda p: p["parameters"], default=None)
        taken = fewest or max(points, key=lambda p: p["validation"])
        ours.setdefault(domain, {})[seed] = taken["accuracy"]
        theirs.setdefault(domain, {})[seed] = whole["accuracy"]
        sizes.append(taken["parameters"] / whole["parameters"])
        picked.append(f"t = {taken['options']['variance']:g} on {domain}")
    pair = stats.paired(ours, theirs, parameters.DOMAINS)
    return pair, statistics.fmean(sizes) if sizes else math.nan, ", ".join(picked)


def against(found: Rows, other: str) -> tuple[stats.Comparison | None, int]:
    """CovNorm's points against another method at equal parameters.

    The other's accuracy is taken straight between its points, in the logarithm of parameters.
    Returns the comparison and how many of CovNorm's points are in the other's range.
    """
    ours = _points(found, "covnorm")
    theirs = _points(found, other)
    gains: dict[str, dict[int, float]] = {}
    used = 0
    for place in _whole(ours, theirs):
        line = sorted((math.log(p[place]["parameters"]), p[place]["accuracy"]) for p in theirs)
        x, y = zip(*line, strict=True)
        inside = [p[place] for p in ours if x[0] <= math.log(p[place]["parameters"]) <= x[-1]]
        if inside:
            used += len(inside)
            off = [p["accuracy"] - np.interp(math.log(p["parameters"]), x, y) for p in inside]
            gains.setdefault(place[0], {})[place[1]] = float(statistics.fmean(off))
    nothing = {d: dict.fromkeys(seeds, 0.0) for d, seeds in gains.items()}
    return stats.paired(gains, nothing, parameters.DOMAINS), used
