"""The figure "accuracy vs parameters": each method over its range of ranks, on two domains.

It also holds our own question: M in closed form, as the identity, or random; tuned and not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from .bench import Bench

DOMAINS = ("objects", "sketches")
THRESHOLDS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
RATIOS = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)  # r = d/2^i, i = 2…6
CURVES = ("covnorm", "svd-fta", "fta", "pca-fta")
BOUNDS = ("ra", "fnft", "bn")
STARTS = ("closed-form", "identity", "random")
START_THRESHOLDS = (0.9, 0.99)


def cells() -> list[tuple[str, dict[str, Any]]]:
    """(method, options) of every point."""
    points: list[tuple[str, dict[str, Any]]] = [(method, {}) for method in BOUNDS]
    points += [(method, options) for method in CURVES for options in curve(method)]
    return points + [("covnorm", options) for options in starts() if "M" in options]


def curve(method: str) -> list[dict[str, Any]]:
    """Options of every point of a method's curve; those of Table 1 are the same cells there."""
    if method == "covnorm":
        return [{"variance": t} for t in THRESHOLDS]
    if method == "pca-fta":
        return [{"ratio": r} for r in RATIOS]
    usual = cn.METHODS[method].options["rank"]
    return [{} if r == usual else {"rank": r} for r in RATIOS]


def starts() -> list[dict[str, Any]]:
    """Options of CovNorm for each start of M; the closed form is the method's own."""
    return [
        {"variance": t, **({} if M == "closed-form" else {"M": M})}
        for t in START_THRESHOLDS
        for M in STARTS
    ]


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """All points of these domains and seeds."""
    names = list(names)
    for seed in seeds:
        for method, options in cells():
            for domain in names:
                bench.cell(method, domain, seed, **options)
