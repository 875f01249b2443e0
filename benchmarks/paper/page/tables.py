"""What the page's tables need beyond one lookup of rows; the template lays them out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import table1
from ..compare import Comparison, paired
from ..keys import cell, start
from ..profiles import SEEDS
from ..published import NAMES
from ..rows import Rows
from .numbers import cells_run

STAGES = {False: "not tuned", True: "tuned"}
METHODS = tuple(m for m in NAMES if m in (*table1.SEVERAL, *table1.ONE))


def key1(rows: Rows, method: str) -> dict[str, Any]:
    """Return the key of a method in Table 1; "A" is what the compressed methods start from."""
    if method == "A":
        return start("vgg16")
    return table1.key(method, len(rows.domains))


def accuracies(rows: Rows, method: str) -> dict[str, dict[int, float]]:
    """Return the test accuracies of a method in Table 1."""
    if method == "A":  # as CovNorm's rows have it: where an A was lost, another was trained
        return rows.values(key1(rows, "covnorm"), "tested", "train")
    return rows.values(key1(rows, method))


def keys1(rows: Rows, methods: Iterable[str]) -> list[dict[str, Any]]:
    """Return the keys of methods in Table 1, in its order."""
    return [key1(rows, m) for m in METHODS if m in [*methods]]


def methods1(rows: Rows, brief: bool) -> list[str]:
    """Return the methods of Table 1, or (`brief`) those that have rows."""
    return [m for m in METHODS if not brief or rows.of(key1(rows, m))]


def table1_run(rows: Rows, brief: bool) -> str:
    """Say how much of Table 1 was run; when `brief`, one seed is enough."""
    methods = methods1(rows, brief)
    done = [accuracies(rows, m) if brief else rows.of(key1(rows, m)) for m in methods]
    seeds = [1 if brief or m in table1.ONE else len(SEEDS) for m in methods]
    return cells_run(sum(map(len, done)), sum(seeds) * len(rows.domains))


def compared(rows: Rows, a: str, b: str) -> Comparison | None:
    """Compare two methods of Table 1, paired by domain."""
    return paired(accuracies(rows, a), accuracies(rows, b), rows.domains)


def full_size(rows: Rows, backbone: str, field: str = "parameters") -> float | None:
    """Return the parameters of full residual adapters, however long they were trained."""
    sizes = (rows.mean(key, field) for key in (start(backbone), cell(backbone, "ra")))
    return next((size for size in sizes if size), None)
