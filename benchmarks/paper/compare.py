"""Means over domains and seeds, and paired comparisons by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats

Values = Mapping[str, Mapping[int, float]]  # {domain: {seed: number}}
LEVEL = 0.95  # of intervals


class Comparison(NamedTuple):
    """A mean difference with its 95 % interval, which is infinite for one domain."""

    mean: float
    low: float
    high: float
    by_domain: tuple[float, ...]

    @property
    def domains(self) -> int:
        """The number of domains."""
        return len(self.by_domain)

    @property
    def verdict(self) -> str:
        """The side of zero that the interval lies on: "above", "below", "not distinguishable"."""
        return "above" if self.low > 0 else "below" if self.high < 0 else "not distinguishable"


def over_seeds(values: Values, domains: Sequence[str]) -> list[float]:
    """Return the mean over these domains for each seed that has all of them."""
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    complete = [s for s in seeds if domains and all(s in values.get(d, {}) for d in domains)]
    return [statistics.fmean(values[d][s] for d in domains) for s in complete]


def paired(a: Values, b: Values, domains: Sequence[str]) -> Comparison | None:
    """Compare a − b on the cells that both have, if any: average the seeds of each domain first."""
    seeds = {d: sorted(a.get(d, {}).keys() & b.get(d, {}).keys()) for d in domains}
    return interval(
        [statistics.fmean(a[d][s] - b[d][s] for s in both) for d, both in seeds.items() if both]
    )


def interval(gains: Sequence[float]) -> Comparison | None:
    """Return the mean of one gain per domain, with an interval by Student's t over the domains."""
    if not gains:
        return None
    mean, off = statistics.fmean(gains), error(gains)
    half = math.inf if off is None else float(stats.t.ppf((1 + LEVEL) / 2, len(gains) - 1)) * off
    return Comparison(mean, mean - half, mean + half, tuple(gains))


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation (n − 1), or None for one value."""
    return statistics.stdev(values) if len(values) > 1 else None


def error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean, or None for one value."""
    return float(stats.sem(values)) if len(values) > 1 else None
