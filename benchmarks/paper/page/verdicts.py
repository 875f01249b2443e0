"""An expectation and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from . import stats

WITHIN = 0.5  # points that count as none
WIDE = 5.0  # points that are a wide margin: said before any of its cells was run
HOLDS, ON_THE_MEAN = "Holds", "Holds on the mean alone"
MISSED, FAILS = "Missed on the mean, not refuted", "Does not hold"
TOO_LARGE = "Does not hold: too many parameters"
OPEN = "Not run yet"


@dataclass(frozen=True)
class Claim:
    """An expectation, its numbers in words, and the verdict."""

    key: str
    claim: str
    numbers: str
    verdict: str


def judged(at_least: float, pair: stats.Comparison, wanted: int) -> str:
    """Whether a difference is at least so many points; no verdict before all domains are there."""
    if pair.domains < wanted:
        return OPEN
    if pair.mean < at_least:
        return FAILS if pair.high < at_least else MISSED
    return HOLDS if pair.low >= at_least else ON_THE_MEAN


def unless(too_large: bool, verdict: str) -> str:
    """A verdict, which too many parameters turn."""
    return TOO_LARGE if too_large and verdict != OPEN else verdict
