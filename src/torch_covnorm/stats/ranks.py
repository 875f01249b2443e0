"""Rank rules: how many directions of a spectrum E (d,), largest first, to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TypeVar

from torch import Tensor

from ..errors import CovNormError, choices

T = TypeVar("T")
RankRule = Callable[[Tensor, float], int]  # (spectrum, threshold t) → rank


def explained(E: Tensor) -> Tensor:
    """Return ``r_i = sum_{k<=i} e_k / sum_k e_k`` (d,): the share that the first i explain."""
    cumulated = E.double().cumsum(0)
    return cumulated / cumulated[-1]


def by_variance(E: Tensor, t: float) -> int:
    """Return the paper's rank: the smallest i with ``r_i > t``; ``t = 1`` keeps all directions.

    A feature that never varies has no spectrum to choose by and keeps one direction.
    """
    check_threshold(t)
    if t == 1:
        return len(E)
    if not E[0] > 0:
        return 1
    return int((explained(E) <= t).sum()) + 1


def by_variance_official(E: Tensor, t: float) -> int:
    """Return the rank of the authors' code: the number of ``r_i < t``, but at least 2."""
    check_threshold(t)
    below = int((explained(E) < t).sum()) if E[0] > 0 else 0
    return min(max(below, 2), len(E))


def by_budget(
    worths: Mapping[str, Tensor], costs: Mapping[str, int], budget: int, least: int = 1
) -> dict[str, int]:
    """Spend one budget of parameters over all sites where it is worth most; return {site: k}.

    Direction i of a site is worth ``e_i`` (its output variance, or its loss ``s_i²``) and costs
    d_in + d_out parameters. Directions are taken in the order of ``e_i / cost`` until the budget is
    spent. Every site keeps at least `least` directions (1 or 0).
    """
    ranks = dict.fromkeys(worths, least)
    left = budget - check_budget(budget, list(costs.values()), least)
    offers = [
        (float(e) / costs[site], position, site)
        for position, (site, E) in enumerate(worths.items())
        for e in E[least:]
        if least or e > 0
    ]
    for _, _, site in sorted(offers, key=lambda offer: (-offer[0], offer[1])):
        if costs[site] <= left:
            ranks[site] += 1
            left -= costs[site]
    return ranks


def smallest(sizes: Sequence[T], good: Callable[[T], bool]) -> T:
    """Return the smallest of increasing sizes that is good, by bisection.

    Assumes that sizes above a good one are good, and that the last one is.
    """
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(sizes[middle]) else (middle + 1, high)
    return sizes[low]


def check_budget(budget: int, costs: Sequence[int], least: int = 1) -> int:
    """Check that a budget buys `least` directions at every site (or one anywhere, if `least` is 0).

    Returns the cost of those at every site.
    """
    needed, what = sum(costs), f"one direction at each of {len(costs)} sites"
    if not least:
        needed, what = min(costs), f"one direction at the cheapest of {len(costs)} sites"
    if budget < needed:
        raise CovNormError(
            f"budget={budget} is too small: {what} costs {needed} parameters. Give at least that."
        )
    return needed * least


def check_threshold(t: float) -> None:
    """Check that a threshold lies in (0, 1]."""
    if not 0 < t <= 1:
        raise CovNormError(
            f"variance={t}: the share of variance to keep must lie in (0, 1], for example 0.99"
        )


def check_ranks(kx: int, ky: int, d_in: int, d_out: int, least: int = 1) -> None:
    """Check that ranks lie in least…d."""
    for name, k, d in (("k_x", kx, d_in), ("k_y", ky, d_out)):
        if not least <= k <= d:
            raise CovNormError(f"{name} = {k}, must lie in {least}…{d}")


def check_rank_pairs(ranks: Mapping[str, object], sites: Mapping[str, object]) -> None:
    """Check that explicit ranks are {site: (kx, ky)} for sites that exist."""
    for site, pair in ranks.items():
        if site not in sites:
            raise CovNormError(f"ranks for unknown site {site!r}: {choices(site, sites)}")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise CovNormError(f"site {site!r}: ranks {pair!r}, give (kx, ky)")


def rank_of(rank: int | float, d_out: int, d_in: int) -> int:
    """Return the rank for a number of directions, or for a share of d_out in (0, 1): r = d/2^i."""
    share, whole = isinstance(rank, float), isinstance(rank, Integral) and rank is not True
    if not (0 < rank < 1 if share else whole and rank > 0):
        raise CovNormError(f"rank={rank}: give a whole number from 1, or a share in (0, 1)")
    r = max(1, round(rank * d_out)) if share else int(rank)
    return min(r, d_out, d_in)
