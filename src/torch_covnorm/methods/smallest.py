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
LARGEST_LEAST = 1 / 4  # of A's parameters: the least budget with 100 validation images or fewer
EVIDENCE = 25  # with n validation images, the least budget is 25 / n of A's parameters
CONFIDENCE = 4  # tuning restores confidence more easily than accuracy


def smallest_file(
    run: Run, drop: float, compress: Callable[[int], object]
) -> tuple[int | None, str | None]:
    """Return (budget, precision) of the smallest file within `drop` points of A's own accuracy.

    The mean probability of the true class must be within four times that of A's too: with few
    validation images, some of the many candidates keep their accuracy by chance.

    `compress` compresses the run's domain to a budget. In each precision, bisection goes over 32
    budgets, up to A's own parameters, and the full A after them. The fewer validation images there
    are, the larger is the least budget: 15 images cannot tell a good domain from one that lost
    five points. Every candidate is validated as its file would hold it. M is in closed form, so
    nothing is trained in between. The fewest bytes win. A budget of None means the full A, a
    precision of None that nothing is rounded (``dtype=None``).

    If even the full A loses too much in the requested precision, a more precise one is used.
    """
    wanted, trained, net, name = run.options["dtype"], run.domain, run.net, run.name
    best = _measured(run)
    images = sum(len(labels) for _, labels in run.val or ())
    tolerance = drop + 1e-9  # exactly `drop` is within it, despite rounding
    goal = best[0] - tolerance, best[1] - CONFIDENCE * tolerance
    sizes = [*budgets(trained, min(LARGEST_LEAST, EVIDENCE / max(images, 1))), None]
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
                accuracy, confidence = _measured(run)
                return accuracy >= goal[0] and confidence >= goal[1]

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


def unmeasured_budget(run: Run) -> int:
    """Return the budget, and choose the precision, where no validation images can measure a drop.

    It is the least budget that few validation images would allow, a quarter of the full A.
    """
    run.result.dtype = "int8" if run.options["dtype"] == SMALLEST else run.options["dtype"]
    return budgets(run.domain, LARGEST_LEAST)[0]


def budgets(domain: Domain, least: float = 0.0) -> list[int]:
    """Return budgets of parameters in equal ratios, up to the parameters of the full A.

    The first is one direction per site, or `least`, a share of the full A, if that is more.
    """
    shapes = [A.factors[0].shape for A in domain.maps.values()]
    high = sum(a * b for a, b in shapes)
    low = max(sum(map(sum, shapes)), int(least * high))
    return [round(low * (max(high, low) / low) ** (i / (BUDGETS - 1))) for i in range(BUDGETS)]


def _precisions(wanted: str | None) -> list[str | None]:
    """Return the precisions to try, least precise first: all, or the wanted one and better ones."""
    if wanted is None:
        return [None]
    order = list(reversed(PRECISIONS))
    return [*order[0 if wanted == SMALLEST else order.index(wanted) :]]


def _measured(run: Run) -> tuple[float, float]:
    """Return the accuracy and the mean probability of the true class, in percent."""
    if run.val is None:
        raise CovNormError(f"domain {run.name!r}: max_drop= needs validation data")
    found = evaluate(run.net, run.name, run.val)
    if found.accuracy is None or found.confidence is None:
        raise CovNormError(f"domain {run.name!r}: max_drop= needs labels that are class numbers")
    return found.accuracy, found.confidence
