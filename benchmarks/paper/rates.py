"""The learning rate of every method: the best of three on validation, two domains, one seed.

The same search for all of them; the choice is written down in `bench.RATES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from . import table1
from .bench import EPOCHS, Bench

SEARCH = ("objects", "sketches")


def run(bench: Bench, methods: Iterable[str]) -> None:
    """Every method at every rate."""
    for method in filter(searched, methods):
        for lr in bench.rates(method):
            for domain in places(bench):
                bench.cell(method, domain, 0, lr=lr, **settings(method))


def searched(method: str) -> bool:
    """Those of joint mode take the rate of their like alone, and SVD is not tuned."""
    return not cn.METHODS[method].joint and method != "svd"


def settings(method: str) -> dict[str, Any]:
    """Of the cells of the search: options, and RA as the A that others start from."""
    epochs = {"epochs": EPOCHS} if method == "ra" else {}
    return {**epochs, **table1.OPTIONS.get(method, {})}


def places(bench: Bench) -> tuple[str, ...]:
    """The domains of the search."""
    return SEARCH if bench.folder is None else bench.domains[:1]


def check(bench: Bench, methods: Iterable[str]) -> None:
    """Refuse to go on with a rate that the search did not choose."""
    for method in filter(searched, methods):
        tried: dict[float, float] = {}
        for lr in bench.rates(method):
            rows = [bench.cell(method, d, 0, lr=lr, **settings(method)) for d in places(bench)]
            tried[lr] = statistics.mean(row["validation"] for row in rows)
        best = max(tried, key=lambda lr: tried[lr])
        if tried.get(bench.rate(method), 0) < tried[best]:
            raise SystemExit(
                f"{method} on {bench.backbone}: {best:g} validates best ({tried}), "
                f"and bench.RATES says {bench.rate(method):g}: write it there, and go on"
            )
