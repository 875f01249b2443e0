"""The smallest file within a drop of accuracy, over ranks and precisions."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

from ..compress.precision import PRECISIONS, SMALLEST, as_stored, stored_bytes
from ..errors import CovNormError, CovNormWarning
from ..network.domain import Domain
from ..stats.ranks import smallest
from ..training.evaluation import evaluate
from .run import Run

BUDGETS = 32


def smallest_file(
    run: Run, drop: float, compress: Callable[[int], object]
) -> tuple[int | None, str | None]:
    """(budget, precision) whose file keeps the validation accuracy within `drop` points of A's own.

    `compress` gives the run's domain a budget. In each precision, bisection over 32 budgets, from
    one direction a site to A's own parameters, and the whole A behind them, with every candidate
    measured as its file would have it; M is in closed form, so nothing is trained in between. The
    fewest bytes win. Budget None: the whole A. Precision None: ``dtype=None``, nothing is rounded.

    A precision that is asked for gives way to a finer one where even the whole A loses too much.
    """
    wanted, trained, net, name = run.options["dtype"], run.domain, run.net, run.name
    goal = run.floor = _accuracy(run) - drop - 1e-9  # percents are rounded: just at it is within
    sizes = [*budgets(trained), None]
    asked = 0

    @functools.cache
    def made(budget: int | None) -> Domain:
        if budget is None:
            return trained
        net.domains[name] = copy.deepcopy(trained)
        compress(budget)
        return run.domain

    def least(precision: str | None) -> int:
        """The first of the sizes that is good; one past the last: none is."""

        def good(place: int) -> bool:
            nonlocal asked
            asked += 1
            run.tell("normalize", min(asked, steps), steps)
            net.domains[name] = made(sizes[place])
            with as_stored(net, name, precision):
                return _accuracy(run) >= goal

        return smallest(range(len(sizes) + 1), good)

    def size(place: int, precision: str) -> int:
        net.domains[name] = made(sizes[place])
        with as_stored(net, name, precision):
            return stored_bytes(net, name, PRECISIONS[precision])

    steps = 6 * (len(PRECISIONS) if wanted == SMALLEST else 1)  # 34 sizes halved
    found: list[tuple[int, int, str | None]] = []
    try:
        for precision in _tried(wanted):
            if (place := least(precision)) == len(sizes):
                continue
            if precision is None or wanted != SMALLEST:
                found = [(0, place, precision)]
                break
            found.append((size(place, precision), place, precision))
    finally:
        net.domains[name] = trained
    if not found:
        raise CovNormError(f"domain {name!r}: no precision keeps max_drop={drop}: leave out dtype=")
    _, place, precision = min(found, key=lambda f: f[0])
    if wanted not in (precision, SMALLEST):
        warnings.warn(
            f"domain {name!r}: in {wanted} even the whole A loses more than max_drop={drop} on the "
            f"validation data, so it is stored as {precision}",
            CovNormWarning,
            stacklevel=2,
        )
    return sizes[place], precision


def budgets(domain: Domain) -> list[int]:
    """Budgets of parameters in equal ratios, from one direction a site to those of the A's."""
    shapes = [A.factors[0].shape for A in domain.maps.values()]
    low, high = sum(map(sum, shapes)), sum(a * b for a, b in shapes)
    return [round(low * (max(high, low) / low) ** (i / (BUDGETS - 1))) for i in range(BUDGETS)]


def _tried(wanted: str | None) -> list[str | None]:
    """The precisions to look at, the coarsest first; one that is asked for, and those finer."""
    if wanted is None:
        return [None]
    order = list(reversed(PRECISIONS))
    return [*order] if wanted == SMALLEST else [*order[order.index(wanted) :]]


def _accuracy(run: Run) -> float:
    if run.val is None:
        raise CovNormError(f"domain {run.name!r}: max_drop= needs validation data")
    found = evaluate(run.net, run.name, run.val).accuracy
    if found is None:
        raise CovNormError(f"domain {run.name!r}: max_drop= needs labels that are class numbers")
    return found
