"""How many directions to keep: the rank rules over a spectrum E (d,), largest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from ..errors import CovNormError

T = TypeVar("T")


def explained(E: Tensor) -> Tensor:
    """``r_i = sum_{k<=i} e_k / sum_k e_k`` (d,): the variance that the first i explain."""
    cumulated = E.double().cumsum(0)
    return cumulated / cumulated[-1]


def by_variance(E: Tensor, t: float) -> int:
    """The paper's rule: the smallest i with ``r_i > t``; ``t = 1`` keeps every direction.

    A feature that never varies has no spectrum to choose by and keeps one direction.
    """
    check_threshold(t)
    if t == 1:
        return len(E)
    if not E[0] > 0:
        return 1
    return int((explained(E) <= t).sum()) + 1


def by_variance_official(E: Tensor, t: float) -> int:
    """The authors' code: how many ``r_i < t`` (one fewer than the paper's), at least 2."""
    check_threshold(t)
    below = int((explained(E) < t).sum()) if E[0] > 0 else 0
    return min(max(below, 2), len(E))


def by_budget(
    spectra: Mapping[str, Tensor], costs: Mapping[str, int], budget: int, least: int = 1
) -> dict[str, int]:
    """{site: k}: one budget of parameters for all sites, spent on what is worth most.

    Direction i of a site is worth ``e_i`` (its output variance, or its loss ``s_i²``) for `costs` =
    d_in + d_out parameters; the largest ``e_i / cost`` come first, as far as the budget goes. Every
    site keeps `least` directions, 1 or 0.
    """
    ranks = dict.fromkeys(spectra, least)
    left = budget - check_budget(budget, list(costs.values()), least)
    offers = [
        (float(e) / costs[site], place, site)
        for place, (site, E) in enumerate(spectra.items())
        for e in E[least:]
        if least or e > 0
    ]
    for _, _, site in sorted(offers, key=lambda offer: (-offer[0], offer[1])):
        if costs[site] <= left:
            ranks[site] += 1
            left -= costs[site]
    return ranks


def smallest(sizes: Sequence[T], good: Callable[[T], bool]) -> T:
    """The smallest of rising sizes that is good, by bisection; the last one counts as good.

    What is good stays good as it grows: asked of ``log2(len(sizes))`` of them.
    """
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(sizes[middle]) else (middle + 1, high)
    return sizes[low]


def check_budget(budget: int, costs: Sequence[int], least: int = 1) -> int:
    """Refuse a budget that is not enough for `least` directions at every site, or for any at all.

    Returns what those at every site cost.
    """
    needed, what = sum(costs), f"one direction at each of {len(costs)} sites"
    if not least:
        needed, what = min(costs), f"one direction at the cheapest of {len(costs)} sites"
    if budget < needed:
        raise CovNormError(
            f"budget={budget}: {what} costs {needed} parameters: give as many or more"
        )
    return needed * least


def check_threshold(t: float) -> None:
    """Refuse a threshold outside (0, 1]."""
    if not 0 < t <= 1:
        raise CovNormError(f"variance={t}: the share of variance to keep must lie in (0, 1]")


def check_ranks(kx: int, ky: int, d_in: int, d_out: int, site: str, least: int = 1) -> None:
    """Refuse ranks outside 1…d, or 0…d."""
    for name, k, d in (("k_x", kx, d_in), ("k_y", ky, d_out)):
        if not least <= k <= d:
            raise CovNormError(f"site {site!r}: {name} = {k}, must lie in {least}…{d}")


def rank_of(rank: int | float, d_out: int, d_in: int) -> int:
    """A rank given as a number of directions, or as a share of d_out in (0, 1): r = d/2^i."""
    share = isinstance(rank, float)
    if isinstance(rank, bool) or (share and not 0 < rank < 1) or rank <= 0:
        raise CovNormError(f"rank={rank}: give a whole number from 1, or a share in (0, 1)")
    r = max(1, round(rank * d_out)) if share else int(rank)
    return min(r, d_out, d_in)
