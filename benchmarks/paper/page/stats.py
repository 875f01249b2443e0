"""Means, errors and paired comparisons of {domain: {seed: accuracy}}."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Values = Mapping[str, Mapping[int, float]]
LEVEL = 0.95


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation, n − 1; None of one value."""
    return statistics.stdev(values) if len(values) > 1 else None


def error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None of one value."""
    spread = deviation(values)
    return None if spread is None else spread / math.sqrt(len(values))


def over_seeds(values: Values, domains: Sequence[str]) -> list[float]:
    """The mean over these domains, of each seed that has all of them."""
    seeds = sorted({seed for of_seeds in values.values() for seed in of_seeds})
    whole = [s for s in seeds if domains and all(s in values.get(d, {}) for d in domains)]
    return [statistics.fmean(values[d][s] for d in domains) for s in whole]


@dataclass(frozen=True)
class Comparison:
    """A mean difference over domains; `half` of its interval is None of one domain."""

    mean: float
    half: float | None
    domains: int
    seeds: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return math.inf if self.half is None else self.mean + self.half

    @property
    def verdict(self) -> str:
        """What the interval says: "above", "below" or "not distinguishable"."""
        return "above" if self.low > 0 else "below" if self.high < 0 else "not distinguishable"


def paired(a: Values, b: Values, domains: Sequence[str]) -> Comparison | None:
    """a − b: of each domain the mean over the seeds that both have, then Student's t over domains.

    None where they have no cell in common.
    """
    differences, most = [], 0
    for domain in domains:
        seeds = sorted(a.get(domain, {}).keys() & b.get(domain, {}).keys())
        if seeds:
            differences.append(statistics.fmean(a[domain][s] - b[domain][s] for s in seeds))
            most = max(most, len(seeds))
    if not differences:
        return None
    n, off = len(differences), error(differences)
    half = None if off is None else quantile(n - 1) * off
    return Comparison(statistics.fmean(differences), half, n, most)


def sentence(found: Comparison | None) -> str:
    """A comparison in words."""
    if found is None:
        return "not run yet"
    of = f"{found.domains} domain{'s' * (found.domains > 1)}"
    if found.half is None:
        return f"{signed(found.mean)} points on {of}, which says nothing about others"
    interval = f"95 % interval {signed(found.low)} to {signed(found.high)}, {of}"
    if found.verdict == "not distinguishable":
        return f"not distinguishable: {signed(found.mean)} points ({interval})"
    return f"{found.verdict} by {abs(found.mean):.1f} points ({interval})"


def signed(value: float) -> str:
    """+1.2, −0.3, 0.0."""
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


# ── Student's t ──────────────────────────────────────────────────────────────────────────────


def inside(t: float, freedom: int) -> float:
    """P(|T| ≤ t) with that many degrees of freedom: the finite series in θ = atan(t/√n)."""
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for i in range(2 + odd, freedom - 1, 2):
        term *= (i - 1) / i * cosine**2
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def quantile(freedom: int, level: float = LEVEL) -> float:
    """The t with P(|T| ≤ t) = level, by bisection."""
    low, high = 0.0, 1.0
    while inside(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < level else (low, middle)
    return (low + high) / 2
