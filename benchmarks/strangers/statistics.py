"""What the rows say: complete cells, standard errors, and paired differences with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .cells import METHODS
from .folders import SIZES
from .readers import STRANGERS

Row = dict[str, Any]
Cell = tuple[str, int]  # data set, training images per class
DRAWS = 2000
PLANNED: tuple[Cell, ...] = tuple(
    (name, size) for name, stranger in STRANGERS.items() for size in SIZES if size <= stranger.train
)


class Difference(NamedTuple):
    """A mean difference in points, with its 95 % interval."""

    mean: float
    low: float
    high: float


def by_method(rows: Iterable[Row], backbone: str) -> dict[str, dict[Cell, Row]]:
    """Return {method: {cell: row}} of a backbone."""
    found: dict[str, dict[Cell, Row]] = {method: {} for method in METHODS}
    for row in rows:
        if row["backbone"] == backbone:
            found[row["method"]][row["domain"], row["size"]] = row
    return found


def common(found: Mapping[str, Mapping[Cell, Row]]) -> list[Cell]:
    """Return the cells that every method with any row has."""
    return [c for c in PLANNED if all(c in cells for cells in found.values() if cells)]


def error(row: Row) -> float:
    """Return the binomial standard error of an accuracy, in points."""
    share = row["accuracy"] / 100
    return 100 * math.sqrt(share * (1 - share) / row["n"])


def gains(a: Row, b: Row) -> np.ndarray:
    """Return the difference of each test image, in points: 100, 0 or −100."""
    pair = [np.array([int(c) for c in row["correct"]]) for row in (a, b)]
    return 100.0 * (pair[0] - pair[1])


def paired(a: Row, b: Row) -> tuple[float, float]:
    """Return the difference of two accuracies on the same images, and its standard error."""
    found = gains(a, b)
    return float(found.mean()), float(found.std(ddof=1) / math.sqrt(len(found)))


def difference(
    a: Mapping[Cell, Row], b: Mapping[Cell, Row], cells: Iterable[Cell]
) -> Difference | None:
    """Return the mean of a − b over cells, with a bootstrap interval.

    Data sets are drawn with replacement, and in each its test images. The cells of a data set have
    the same test images, so they are drawn together.
    """
    sets: dict[str, list[np.ndarray]] = {}
    for cell in cells:
        sets.setdefault(cell[0], []).append(gains(a[cell], b[cell]))
    if not sets:
        return None
    points = [np.stack(found) for found in sets.values()]  # (sizes, images) of each data set
    random = np.random.default_rng(0)
    chosen = random.integers(len(points), size=(DRAWS, len(points)))
    total, count = np.zeros(DRAWS), np.zeros(DRAWS)
    for slot in chosen.T:
        for i, found in enumerate(points):
            (draws,) = np.nonzero(slot == i)
            n = found.shape[1]
            weights = random.multinomial(n, np.full(n, 1 / n), size=len(draws)) / n
            total[draws] += (weights @ found.T).sum(1)
            count[draws] += len(found)
    low, high = np.quantile(total / count, (0.025, 0.975))
    mean = np.mean([cell.mean() for found in points for cell in found])
    return Difference(float(mean), float(low), float(high))
