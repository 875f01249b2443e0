"""Numbers as the page writes them; – where there is none."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from . import stats

NONE = "–"


def spread(values: Sequence[float]) -> str:
    """mean ± standard deviation."""
    if not values:
        return NONE
    off = stats.deviation(values)
    return number(statistics.fmean(values)) + ("" if off is None else f" ± {off:.1f}")


def number(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def whole_number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def share(part: float | None, whole: float | None) -> str:
    """In percent of a whole that stands beside it."""
    if part is None or not whole:
        return NONE
    percent = 100 * part / whole
    return f"{percent:.{0 if percent >= 99.95 or not percent else 1 if percent >= 9.95 else 2}f} %"
