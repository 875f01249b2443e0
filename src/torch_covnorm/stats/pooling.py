"""Statistics of several domains together: pooled moments (eq. 10), and what their losses feel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from .moments import Moments


class Felt(NamedTuple):
    """What the losses of domains feel, as sums over them, so that a further one only adds.

    G (d_out, d_out): of ``N_i G_i``, at y. R (d_in, d_in): of ``N_i A_i^T G_i A_i``, at x.
    """

    G: Tensor
    R: Tensor


def felt_by(A: Tensor, G: Tensor, n: int) -> Felt:
    """One domain's part, with its G = E[g g^T] at the output of its A (d_out, d_in)."""
    G = G.cpu().double()
    A = A.detach().to(G)
    return Felt(n * G, n * A.T @ G @ A)


def all_felt(
    before: Mapping[str, Felt], parts: Mapping[str, Mapping[str, Felt]]
) -> dict[str, Felt]:
    """The sums over all domains, at every site."""
    total = dict(before)
    for by_site in parts.values():
        for site, new in by_site.items():
            old = total.get(site)
            total[site] = new if old is None else Felt(old.G + new.G, old.R + new.R)
    return total


def pooled(
    before: Mapping[str, Moments], parts: Mapping[str, Mapping[str, Moments]]
) -> dict[str, Moments]:
    """Eq. 10 at every site: the moments of all domains' rows together."""
    total = dict(before)
    for by_site in parts.values():
        for site, m in by_site.items():
            total[site] = total[site].merge(m) if site in total else m.weighted(m.n)
    return total
