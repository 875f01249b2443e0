"""Statistics of several domains together, for joint mode: moments (eq. 10) and loss metrics."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor

from .moments import Moments


class LossMetric(NamedTuple):
    """The loss metric at a site, summed over domains, so that a further domain only adds to it.

    G (d_out, d_out) is the sum of ``N_i G_i``, the metric of y. R (d_in, d_in) is the sum of
    ``N_i A_i^T G_i A_i``, the metric of x.
    """

    G: Tensor
    R: Tensor

    @classmethod
    def of(cls, A: Tensor, G: Tensor, n: int) -> LossMetric:
        """Return one domain's part, from its G = E[g g^T] at the output of its A (d_out, d_in)."""
        G = G.cpu().double()
        A = A.detach().to(G)
        return cls(n * G, n * A.T @ G @ A)

    def merge(self, other: LossMetric) -> LossMetric:
        """Return the sums over both sets of domains."""
        return LossMetric(self.G + other.G, self.R + other.R)


Statistics = TypeVar("Statistics", Moments, LossMetric)


def pooled(
    before: Mapping[str, Statistics], parts: Mapping[str, Mapping[str, Statistics]]
) -> dict[str, Statistics]:
    """Merge the statistics of several domains at every site (eq. 10); `before` may be empty."""
    total = dict(before)
    for by_site in parts.values():
        for site, new in by_site.items():
            total[site] = total[site].merge(new) if site in total else copy.deepcopy(new)
    return total
