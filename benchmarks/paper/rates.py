"""The learning rate of every method: the best of three on validation, two domains, one seed.

The same search for all of them; the choice is written down in `bench.RATES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch_covnorm as cn

from . import table1
from .bench import Bench

SEARCH = ("objects", "sketches")


def run(bench: Bench, methods: Iterable[str]) -> None:
    """Every method at every rate. Those of joint mode take the rate of their like alone."""
    for method in methods:
        if cn.METHODS[method].joint or method == "svd":
            continue
        for lr in bench.rates(method):
            for domain in bench.domains[:1] if bench.folder else SEARCH:
                bench.cell(method, domain, 0, lr=lr, **table1.OPTIONS.get(method, {}))


def chosen(bench: Bench, method: str) -> dict[float, float]:
    """{rate: mean validation accuracy} of what was tried, best first."""
    tried: dict[float, float] = {}
    for lr in bench.rates(method):
        options = table1.OPTIONS.get(method, {})
        rows = [bench.lines.find(**bench.key(method, d, 0, lr, None, options)) for d in SEARCH]
        if all(rows):
            tried[lr] = statistics.mean(r["validation"] for r in rows if r)
    return dict(sorted(tried.items(), key=lambda pair: -pair[1]))
