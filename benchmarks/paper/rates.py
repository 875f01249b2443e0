"""The learning rate of every kind: the best of three on validation, two domains, one seed.

A kind is a method, also at small sizes, or CovNorm by what else M starts as. The same search for
all of them; the choice is written down in `bench.RATES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from . import parameters, table1
from .bench import EPOCHS, Bench, kind

SEARCH = ("objects", "sketches")
# What is no method of Table 1 as it stands there: {kind: (method, its options in the search)}.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    kind(method, options): (method, options)
    for method, options in (
        ("covnorm", {"variance": 0.9}),
        ("svd-fta", {"rank": 1 / 32}),
        ("fta", {"rank": 1 / 32}),
        *(("covnorm", start) for start in parameters.starts() if "M" in start),
    )
}


def run(bench: Bench, kinds: Iterable[str]) -> None:
    """Every kind at every rate."""
    for name in filter(searched, kinds):
        for lr in bench.rates(name):
            for domain in places(bench):
                tried(bench, name, domain, lr)


def searched(name: str) -> bool:
    """Those of joint mode take the rate of their like alone, and SVD is not tuned."""
    return name in OTHERS or (not cn.METHODS[name].joint and name != "svd")


def tried(bench: Bench, name: str, domain: str, lr: float) -> dict[str, Any]:
    """A row of the search for a kind; of RA it is the A that others start from."""
    method, options = plain(name)
    epochs = EPOCHS if method == "ra" else None
    return bench.cell(method, domain, 0, lr=lr, epochs=epochs, **options)


def plain(name: str) -> tuple[str, dict[str, Any]]:
    """The method of a kind, and its options in the search."""
    return OTHERS.get(name, (name, table1.OPTIONS.get(name, {})))


def places(bench: Bench) -> tuple[str, ...]:
    """The domains of the search."""
    return SEARCH if bench.folder is None else bench.domains[:1]


def check(bench: Bench, kinds: Iterable[str]) -> None:
    """Refuse to go on with a rate that the search did not choose."""
    for name in filter(searched, kinds):
        means: dict[float, float] = {}
        for lr in bench.rates(name):
            rows = [tried(bench, name, domain, lr) for domain in places(bench)]
            means[lr] = statistics.mean(row["validation"] for row in rows)
        best = max(means, key=lambda lr: means[lr])
        if means.get(bench.rate(name), 0) < means[best]:
            raise SystemExit(
                f"{name} on {bench.backbone}: {best:g} validates best ({means}), "
                f"and bench.RATES says {bench.rate(name):g}: write it there, and go on"
            )
