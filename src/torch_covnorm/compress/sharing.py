"""What several domains share at a site: pooled moments (eq. 10), and the C and W made from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..adapters import SharedFactors
from ..stats.decomposition import PCA, color, loss_color, loss_whiten, whiten
from ..stats.moments import Moments
from ..stats.pooling import Felt
from ..stats.ranks import by_variance, check_ranks


def factors_of(
    x: Moments, y: Moments, felt: Felt | None, settings: Mapping[str, Any], site: str, like: Tensor
) -> SharedFactors:
    """W and C (eq. 7) of the global PCAs, or of what all losses feel; in the dtype of `like`."""
    of_x, of_y, t = PCA.of(x), PCA.of(y), settings["variance"]
    if felt is None:
        W, C, worth = whiten(of_x, x.d), color(of_y, y.d), (of_x.E, of_y.E)
    else:
        (W, of_W), (C, of_C) = loss_whiten(of_x, felt.R), loss_color(y.covariance, felt.G)
        worth = (of_W, of_C)
    kx, ky = settings["ranks"].get(site) or (by_variance(E, t) for E in worth)
    check_ranks(kx, ky, x.d, y.d, site)
    return SharedFactors(*(part.to(like) for part in (W[:kx], C[:, :ky], of_x.mu)))


def captured_share(Q: Tensor, Sigma: Tensor) -> float:
    """How much of a covariance (d, d) the span of Q (d, k) holds: tr QᵀΣQ / tr Σ, Q orthonormal."""
    total = float(Sigma.trace())
    U, s, _ = torch.linalg.svd(Q, full_matrices=False)
    Q = U[:, s > 1e-9 * s[0]]
    return float((Q * (Sigma @ Q)).sum()) / total if total > 0 else 1.0


def captured(
    factors: Mapping[str, SharedFactors],
    x: Mapping[str, Moments],
    y: Mapping[str, Moments],
    felt: Mapping[str, Felt] | None,
    G: Mapping[str, Tensor],
) -> dict[str, tuple[float, float]]:
    """{site: (of x, of y)}: the shares of a domain's variance, or loss, that a basis holds."""
    out = {}
    for site, shared in factors.items():
        assert shared.C is not None
        W, C = shared.W.to(x[site].mean), shared.C.to(x[site].mean)
        of_x, of_y = x[site].covariance, y[site].covariance
        if felt is None:
            out[site] = (captured_share(W.T, of_x), captured_share(C, of_y))
            continue
        at_y, at_x = _root(G[site].to(of_y)), _root(of_x)
        out[site] = (
            captured_share(at_x @ W.T, at_x @ felt[site].R.to(of_x) @ at_x),
            captured_share(at_y @ C, at_y @ of_y @ at_y),
        )
    return out


def _root(Sigma: Tensor) -> Tensor:
    E, P = torch.linalg.eigh(Sigma)
    return (P * E.clamp(min=0).sqrt()) @ P.T
