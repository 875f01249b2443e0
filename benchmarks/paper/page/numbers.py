"""How the page prints numbers and comparisons; "–" where there is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from ..compare import Comparison, deviation

NONE = "–"


def sentence(pair: Comparison | None) -> str:
    """Describe a comparison in words."""
    if pair is None:
        return "not run yet"
    domains = f"{pair.domains} domain{'s' * (pair.domains > 1)}"
    if math.isinf(pair.low):
        return f"{signed(pair.mean)} points on {domains}, which says nothing about other domains"
    ends = f"95 % interval {signed(pair.low)} to {signed(pair.high)}, {domains}"
    if pair.verdict == "not distinguishable":
        return f"not distinguishable: {signed(pair.mean)} points ({ends})"
    return f"{pair.verdict} by {abs(pair.mean):.1f} points ({ends})"


def signed(value: float) -> str:
    """Format a difference: +1.2, −0.3, 0.0."""
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def spread(values: Iterable[float]) -> str:
    """Format the mean ± the standard deviation."""
    values = list(values)
    return with_error(statistics.fmean(values), deviation(values)) if values else NONE


def with_error(mean: float | None, off: float | None) -> str:
    """Format a mean and what stands after ±, if there is any."""
    return number(mean) + ("" if off is None else f" ± {off:.1f}")


def number(value: float | None, spec: str = ".1f") -> str:
    """Format a number that may be missing."""
    return NONE if value is None else f"{value:{spec}}"


def share(part: float | None, whole: float | None) -> str:
    """Format a part in percent of the whole."""
    if part is None or not whole:
        return NONE
    percent = 100 * part / whole
    return f"{percent:.{0 if percent >= 99.95 or not percent else 1 if percent >= 9.95 else 2}f} %"


def cells_run(done: int, planned: int) -> str:
    """Say how many cells of a table were run."""
    if not planned:
        return "No cell was run."
    return "All cells were run." if done >= planned else f"{done} of {planned} cells were run."
