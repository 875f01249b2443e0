"""The learning rate of every kind: the best of three on validation, two domains, one seed.

A kind is a method, or CovNorm by what else M starts as. The same search for all of them; the choice
is written down in `bench.RATES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from . import parameters, table1
from .bench import EPOCHS, Bench

SEARCH = ("objects", "sketches")
STARTS = {f"covnorm-{M}": M for M in parameters.STARTS if M != "closed-form"}


def run(bench: Bench, kinds: Iterable[str]) -> None:
    """Every kind at every rate."""
    for kind in filter(searched, kinds):
        for lr in bench.rates(kind):
            for domain in places(bench):
                tried(bench, kind, domain, lr)


def searched(kind: str) -> bool:
    """Those of joint mode take the rate of their like alone, and SVD is not tuned."""
    return kind in STARTS or (not cn.METHODS[kind].joint and kind != "svd")


def tried(bench: Bench, kind: str, domain: str, lr: float) -> dict[str, Any]:
    """A row of the search; of RA it is the A that others start from."""
    method, options = plain(kind)
    epochs = EPOCHS if method == "ra" else None
    return bench.cell(method, domain, 0, lr=lr, epochs=epochs, **options)


def plain(kind: str) -> tuple[str, dict[str, Any]]:
    """The method of a kind, and its options in the search."""
    if kind in STARTS:
        return "covnorm", {**table1.OPTIONS["covnorm"], "M": STARTS[kind]}
    return kind, table1.OPTIONS.get(kind, {})


def places(bench: Bench) -> tuple[str, ...]:
    """The domains of the search."""
    return SEARCH if bench.folder is None else bench.domains[:1]


def check(bench: Bench, kinds: Iterable[str]) -> None:
    """Refuse to go on with a rate that the search did not choose."""
    for kind in filter(searched, kinds):
        means: dict[float, float] = {}
        for lr in bench.rates(kind):
            rows = [tried(bench, kind, domain, lr) for domain in places(bench)]
            means[lr] = statistics.mean(row["validation"] for row in rows)
        best = max(means, key=lambda lr: means[lr])
        if means.get(bench.rate(kind), 0) < means[best]:
            raise SystemExit(
                f"{kind} on {bench.backbone}: {best:g} validates best ({means}), "
                f"and bench.RATES says {bench.rate(kind):g}: write it there, and go on"
            )
