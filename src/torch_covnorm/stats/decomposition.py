"""Whiten, color and the mini-adaptation M: tensors in, tensors out.

``A ≈ C M W`` (eq. 8): W whitens the input x of A, C colors with the statistics of its output y,
and M aligns the two PCAs. Everything is computed in float64.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..errors import CovNormError, choices
from .moments import Moments

MiniAdaptation = Literal["closed-form", "identity", "random"]

# Directions with less variance than this share of the largest are whitened as if they had it. The
# scale cancels between W and M, so A is still reproduced exactly; it only keeps W's numbers small.
EIGENVALUE_FLOOR = 1e-7


class PCA(NamedTuple):
    """The paper's (P, E, mu): eigenvectors (d, d) as columns, eigenvalues (d,), mean (d,)."""

    P: Tensor
    E: Tensor
    mu: Tensor

    @classmethod
    def of(cls, moments: Moments) -> PCA:
        """``Sigma = P E P^T`` (eq. 1) of some moments."""
        E, P = moments.pca()
        return cls(P, E, moments.mean)


class Factors(NamedTuple):
    """``y ≈ C M W (x - mu_x) + mu_y``: W (kx, d_in), M (ky, kx), C (d_out, ky)."""

    W: Tensor
    M: Tensor
    C: Tensor
    mu_x: Tensor
    mu_y: Tensor


def whiten(x: PCA, k: int) -> Tensor:
    """``W = E^{-1/2} P^T`` of the k largest directions (eq. 7, left): (k, d)."""
    return x.P[:, :k].T / _floored(x.E)[:k].sqrt()[:, None]


def color(y: PCA, k: int) -> Tensor:
    """``C = P E^{1/2}`` of the k largest directions (eq. 7, right): (d, k)."""
    return y.P[:, :k] * _floored(y.E)[:k].sqrt()


def closed_form(
    A: Tensor, W: Tensor, C: Tensor, Sigma: Tensor | None = None, G: Tensor | None = None
) -> Tensor:
    """``M* = C^+ A W^+ = E_y^{-1/2} P_y^T A P_x E_x^{1/2}`` (ky, kx); not in the paper.

    The best M for given C and W; at full ranks C M* W is A itself. The columns of C and the rows
    of W are orthogonal, so their pseudo-inverses are transposes over squared lengths.

    In joint mode W does not whiten the data of one domain, with its own `Sigma` (d, d) of x. What
    W drops of x is then correlated with what it keeps, and the best M takes that part along:
    ``M* + C^+ A (I - W^+ W) Sigma W^T (W Sigma W^T)^+``.

    With `G` (d_out, d_out) the best in the metric of the loss: C and W are those of `loss_color`
    and `loss_whiten`, and C^+ is ``(C^T G C)^+ C^T G``.
    """
    A = A.to(C)
    if G is None:
        C_inverse, W_inverse = C.T / C.square().sum(0)[:, None], W.T / W.square().sum(1)
    else:
        root, _ = _roots(G.to(C))
        C_inverse, W_inverse = torch.linalg.pinv(root @ C) @ root, torch.linalg.pinv(W)
    if Sigma is not None and len(W) < W.shape[1]:
        kept, rest = W @ Sigma @ W.T, Sigma @ W.T - W_inverse @ (W @ Sigma @ W.T)
        W_inverse = W_inverse + rest @ torch.linalg.pinv(kept, rtol=1e-6, hermitian=True)
    return C_inverse @ A @ W_inverse


def covariance_normalization(
    A: Tensor,
    x: PCA,
    y: PCA,
    kx: int,
    ky: int,
    M: MiniAdaptation = "closed-form",
    scaled: bool = True,
    generator: torch.Generator | None = None,
) -> Factors:
    """Eq. 8: the factors that stand for A (d_out, d_in) between the PCAs of its input and output.

    `M` chooses the mini-adaptation: its closed form, the truncated identity (eq. 4, which leaves
    the two PCAs unaligned), or Gaussian with standard deviation 0.01. `scaled=False` leaves the
    eigenvalues out of W and C, as the authors' program does.
    """
    W = whiten(x, kx) if scaled else x.P[:, :kx].T
    C = color(y, ky) if scaled else y.P[:, :ky]
    return Factors(W, mini_adaptation(M, A, W, C, None, generator), C, x.mu, y.mu)


def loss_normalization(
    A: Tensor,
    x: PCA,
    G: Tensor,
    mu_y: Tensor,
    ky: int | None = None,
    kx: int | None = None,
) -> tuple[Factors, Tensor]:
    """The factors of rank ky that cost the loss least, and all ``s²`` (min(d),); not in the paper.

    ``½ s_i²`` of ``G^{1/2} A Sigma^{1/2} = U s V^T`` is the loss that direction i is worth, with G
    (d_out, d_out) as `GradientMoments.second` gives it. The best B of rank k in ``E|G^{1/2} (A - B)
    x|²`` is ``C M W`` with ``W = V^T Sigma^{-1/2}``, M the truncated identity and
    ``C = G^{-1/2} U_k s_k``. W whitens x and C colors y, as in eq. 7, so that M is tuned in units
    of the features, however sure the network is (G^{-1/2} alone has the scale of 1/gradient).
    With G = I it is the PCA of y, with Sigma = I too the SVD of A. Where no loss is felt, or x
    never varies, all ``s²`` are 0.
    """
    root, inverse = _roots(G.to(x.mu))
    e = _floored(x.E).sqrt()
    U, s, Vt = torch.linalg.svd(root @ A.to(x.mu) @ (x.P * e))
    ky, kx = len(s) if ky is None else ky, len(Vt) if kx is None else kx
    C, W = inverse @ U[:, :ky] * s[:ky], (Vt[:kx] / e) @ x.P.T
    alive = (G.diagonal().max() > 0).to(s) * (x.E[0] > 0)  # or the floor would stand for a worth
    return Factors(W, torch.eye(ky, kx).to(C), C, x.mu, mu_y), s.square() * alive


def loss_whiten(x: PCA, R: Tensor) -> tuple[Tensor, Tensor]:
    """W (d, d) that whitens x, its directions in the order of the loss that they carry (d,).

    Of several domains that share it: ``R`` (d, d) is the mean of their ``A^T G A``, and with
    ``Sigma^{1/2} R Sigma^{1/2} = V r V^T`` it is ``W = V^T Sigma^{-1/2}``. The first k rows serve.
    """
    e = _floored(x.E).sqrt()
    r, V = torch.linalg.eigh((x.P * e).T @ R.to(x.mu) @ (x.P * e))
    return (V.flip(1).T / e) @ x.P.T, r.flip(0).clamp(min=0) * (x.E[0] > 0)


def loss_color(Sigma: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """C (d, d) that colors as y, of covariance Sigma, does, and the loss of its directions (d,).

    ``G^{1/2} Sigma G^{1/2} = U l U^T`` and ``C = G^{-1/2} U l^{1/2}``; the first k columns serve.
    """
    root, inverse = _roots(G.to(Sigma))
    values, U = torch.linalg.eigh(root @ Sigma @ root)
    values = values.flip(0).clamp(min=0)
    alive = (G.diagonal().max() > 0).to(values)
    return inverse @ U.flip(1) * _floored(values).sqrt(), values * alive


def mini_adaptation(
    M: MiniAdaptation,
    A: Tensor,
    W: Tensor,
    C: Tensor,
    Sigma: Tensor | None = None,
    generator: torch.Generator | None = None,
    G: Tensor | None = None,
) -> Tensor:
    """M (ky, kx) as it starts between W (kx, d_in) and C (d_out, ky)."""
    shape = C.shape[1], len(W)
    if M == "closed-form":
        return closed_form(A, W, C, Sigma, G)
    if M == "identity":
        return torch.eye(*shape).to(C)
    if M == "random":
        return (0.01 * torch.randn(*shape, generator=generator)).to(C)
    raise CovNormError(f"M={M!r}: {choices(M, get_args(MiniAdaptation))}")


def _floored(E: Tensor) -> Tensor:
    top = float(E[0])
    return E.clamp(min=EIGENVALUE_FLOOR * (top if top > 0 else 1 / EIGENVALUE_FLOOR))


def _roots(G: Tensor) -> tuple[Tensor, Tensor]:
    """``G^{1/2}`` and ``G^{-1/2}`` (d, d), of the floored eigenvalues."""
    E, P = torch.linalg.eigh(G)
    g = _floored(E.flip(0)).flip(0).sqrt()
    return (P * g) @ P.T, (P / g) @ P.T
