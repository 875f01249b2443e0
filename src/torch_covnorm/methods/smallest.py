"""Find the smallest file within a drop of accuracy, over ranks and precisions."""

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
    """Return (budget, precision) of the smallest file within `drop` points of A's own accuracy.

    `compress` compresses the run's domain to a budget. In each precision, bisection goes over 32
    budgets, from one direction per site to A's own parameters, and the full A after them. Every
    candidate is validated as its file would hold it. M is in closed form, so nothing is trained in
    between. The fewest bytes win. A budget of None means the full A, a precision of None that
    nothing is rounded (``dtype=None``).

    If even the full A loses too much in the requested precision, a more precise one is used.
    """
    wanted, trained, net, name = run.options["dtype"], run.domain, run.net, run.name
    goal = run.floor = _accuracy(run) - drop - 1e-9  # exactly `drop` is within it, despite rounding
    sizes = [*budgets(trained), None]
    steps = 6 * (len(PRECISIONS) if wanted == SMALLEST else 1)  # bisection of 34 sizes
    tried = 0

    @functools.cache
    def compressed(budget: int | None) -> Domain:
        if budget is None:
            return trained
        net.domains[name] = copy.deepcopy(trained)
        compress(budget)
        return run.domain

    def first_good(precision: str | None) -> int:
        """Return the index of the smallest size that is good; len(sizes) if none is."""

        def good(index: int) -> bool:
            nonlocal tried
            tried += 1
            run.report("normalize", min(tried, steps), steps)
            net.domains[name] = compressed(sizes[index])
            with as_stored(net, name, precision):
                return _accuracy(run) >= goal

        return smallest(range(len(sizes) + 1), good)

    def size(index: int, precision: str) -> int:
        net.domains[name] = compressed(sizes[index])
        with as_stored(net, name, precision):
            return stored_bytes(net, name, PRECISIONS[precision])

    candidates: list[tuple[int, int, str | None]] = []  # (bytes, index, precision)
    try:
        for precision in _precisions(wanted):
            if (index := first_good(precision)) == len(sizes):
                continue
            if precision is None or wanted != SMALLEST:
                candidates = [(0, index, precision)]
                break
            candidates.append((size(index, precision), index, precision))
    finally:
        net.domains[name] = trained
    if not candidates:
        raise CovNormError(f"domain {name!r}: no precision keeps max_drop={drop}: leave out dtype=")
    _, index, precision = min(candidates, key=lambda candidate: candidate[0])
    if wanted not in (precision, SMALLEST):
        warnings.warn(
            f"domain {name!r} is stored as {precision}: in {wanted} even the full A loses more "
            f"than max_drop={drop} on the validation data",
            CovNormWarning,
            stacklevel=2,
        )
    return sizes[index], precision


def budgets(domain: Domain) -> list[int]:
    """Return budgets of parameters in equal ratios, from one direction per site to the full A."""
    shapes = [A.factors[0].shape for A in domain.maps.values()]
    low, high = sum(map(sum, shapes)), sum(a * b for a, b in shapes)
    return [round(low * (max(high, low) / low) ** (i / (BUDGETS - 1))) for i in range(BUDGETS)]


def _precisions(wanted: str | None) -> list[str | None]:
    """Return the precisions to try, least precise first: all, or the wanted one and better ones."""
    if wanted is None:
        return [None]
    order = list(reversed(PRECISIONS))
    return [*order[0 if wanted == SMALLEST else order.index(wanted) :]]


def _accuracy(run: Run) -> float:
    if run.val is None:
        raise CovNormError(f"domain {run.name!r}: max_drop= needs validation data")
    found = evaluate(run.net, run.name, run.val).accuracy
    if found is None:
        raise CovNormError(f"domain {run.name!r}: max_drop= needs labels that are class numbers")
    return found
