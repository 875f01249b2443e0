"""Geometric approximations of A, which the paper compares with: truncated SVD, alone and joint.

They look at the matrix A alone, where CovNorm looks at the data that it meets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..adapters import FullMap, LinearMap, LowRankMap
from ..errors import CovNormError
from ..network.domain import Domain
from ..network.network import MultiDomainNetwork
from ..stats.ranks import rank_of


def svd(A: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """``A ≈ (U√S)(√S Vᵀ)`` at rank r: C (d_out, r) and W (r, d_in), in float64."""
    U, S, V = torch.linalg.svd(A.double(), full_matrices=False)
    root = S[:r].sqrt()
    return U[:, :r] * root, root[:, None] * V[:r]


def joint_svd(matrices: Sequence[Tensor], r: int) -> tuple[list[Tensor], Tensor]:
    """The A_i (d_out, d_in) stacked, then `svd`: a C_i (d_out, r) each, and one W (r, d_in).

    Rebuffi 2018: W is shared and frozen, C_i is the domain's own.
    """
    C, W = svd(torch.cat(list(matrices)), r)
    return list(C.split([len(A) for A in matrices])), W


@torch.inference_mode(False)
@torch.no_grad()
def svd_(net: MultiDomainNetwork, name: str, rank: int | float = 0.25) -> dict[str, int]:
    """Replace each A of a domain by its truncated SVD: 2 r d parameters a site; returns the ranks.

    `rank` is a number of directions, or a share of d: r = d/2^i in the paper, one i for the net.
    """
    new: dict[str, LinearMap] = {}
    for site, A in full_maps(net.domain(name)).items():
        C, W = svd(A.matrix().cpu(), rank_of(rank, *A.matrix().shape))
        new[site] = LowRankMap.of(A.spatial, C.to(A.bias), W.to(A.bias), A.bias)
    adapters = net.domain(name).adapters
    for site, map_ in new.items():
        adapters[site].A = map_.train(net.training)
    return {site: map_.ranks[0] for site, map_ in new.items()}


def full_maps(domain: Domain) -> dict[str, FullMap]:
    """{site: A} of a domain whose every A is a trained full matrix."""
    maps = {site: A for site, A in domain.maps.items() if isinstance(A, FullMap)}
    other = [site for site in domain.maps if site not in maps]
    if other or not maps:
        what = f"site {other[0]!r} has been compressed already" if other else "it has no matrix A"
        raise CovNormError(
            f"domain {domain.name!r}: {what}; start from one trained with method='ra'"
        )
    for site, A in maps.items():
        if not A.A.isfinite().all():
            raise CovNormError(f"site {site!r}: A holds NaN or Inf: train the domain anew")
    return maps
