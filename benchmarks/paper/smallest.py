"""The default of `covnorm add`: the smallest file within half a point of RA on validation.

The search covers ranks in either metric and float32, float16 and int8. It decides which metric is
the default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .bench import Bench
from .keys import cell, start
from .settings import EPOCHS

METRICS = ("variance", "loss")


def options(metric: str) -> dict[str, Any]:
    """Return CovNorm's options."""
    return {"metric": metric, "max_drop": 0.5, "dtype": "smallest"}


def keys(backbone: str) -> dict[str, dict[str, Any]]:
    """Return {name: key} of RA and of the smallest file in each metric."""
    named = {f"RA after {EPOCHS} epochs, float32": start(backbone)}
    return named | {f"{m} metric": cell(backbone, "covnorm", options(m)) for m in METRICS}


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """Measure all cells."""
    names = list(names)
    for seed in seeds:
        for domain in names:
            for metric in METRICS:
                bench.cell("covnorm", domain, seed, **options(metric))
