"""Geometric approximations of A that the paper compares with: the SVD, alone and joint.

They see only the matrix A, whereas CovNorm sees the data that A meets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..adapters import FullMap, LinearMap, LowRankMap
from ..errors import CovNormError, at_site
from ..network.domain import Domain
from ..network.network import MultiDomainNetwork
from ..stats import solver
from ..stats.ranks import rank_of
from .collect import replace_maps_


def svd(A: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return C (d_out, r) and W (r, d_in) of ``A ≈ (U√S)(√S Vᵀ)`` at rank r, in float64."""
    U, s, Vt = solver.svd(A)
    root = s[:r].sqrt()
    return U[:, :r] * root, root[:, None] * Vt[:r]


def joint_svd(matrices: Sequence[Tensor], r: int) -> tuple[list[Tensor], Tensor]:
    """Stack the A_i (d_out, d_in), then `svd`: return one C_i (d_out, r) each and one W (r, d_in).

    Rebuffi 2018: W is shared and frozen, C_i belongs to the domain.
    """
    C, W = svd(torch.cat(list(matrices)), r)
    return list(C.split([len(A) for A in matrices])), W


@torch.inference_mode(False)
@torch.no_grad()
def svd_(net: MultiDomainNetwork, name: str, rank: int | float = 0.25) -> dict[str, int]:
    """Replace each A of a domain by its truncated SVD, 2 r d parameters per site; return the ranks.

    `rank` is a number of directions, or a share of d: r = d/2^i in the paper, one i for the net.
    """
    new: dict[str, LinearMap] = {}
    for site, A in full_maps(net.domain(name)).items():
        with at_site(site):
            C, W = svd(A.matrix(), rank_of(rank, *A.matrix().shape))
        new[site] = LowRankMap.of(A.spatial, C.to(A.bias), W.to(A.bias), A.bias)
    replace_maps_(net, name, new)
    return {site: map_.ranks[0] for site, map_ in new.items()}


def full_maps(domain: Domain) -> dict[str, FullMap]:
    """Return {site: A} of a domain whose every A is a trained full matrix."""
    maps = {site: A for site, A in domain.maps.items() if isinstance(A, FullMap)}
    other = [site for site in domain.maps if site not in maps]
    if other or not maps:
        what = f"site {other[0]!r} is already compressed" if other else "it has no matrix A"
        raise CovNormError(
            f"domain {domain.name!r}: {what}. Start from a domain trained with method='ra'."
        )
    for site, A in maps.items():
        if not A.A.isfinite().all():
            raise CovNormError(f"site {site!r}: A contains NaN or Inf: retrain the domain")
    return maps
