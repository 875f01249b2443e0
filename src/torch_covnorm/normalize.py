"""Whiten, color and the mini-adaptation M: tensors in, tensors out.

``A ≈ C M W`` (eq. 8): W whitens the input x of A, C colors with the statistics of its output y,
and M aligns the two PCAs. Everything is computed in float64.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .errors import CovNormError, choices
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


def closed_form(A: Tensor, W: Tensor, C: Tensor, Sigma: Tensor | None = None) -> Tensor:
    """``M* = C^+ A W^+ = E_y^{-1/2} P_y^T A P_x E_x^{1/2}`` (ky, kx); not in the paper.

    The best M for given C and W; at full ranks C M* W is A itself. The columns of C and the rows
    of W are orthogonal, so their pseudo-inverses are transposes over squared lengths.

    In joint mode W does not whiten the data of one domain, with its own `Sigma` (d, d) of x. What
    W drops of x is then correlated with what it keeps, and the best M takes that part along:
    ``M* + C^+ A (I - W^+ W) Sigma W^T (W Sigma W^T)^+``.
    """
    C_inverse = C.T / C.square().sum(0)[:, None]
    W_inverse = W.T / W.square().sum(1)
    A = A.to(C)
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
    A: Tensor, x: PCA, G: Tensor, mu_y: Tensor, k: int | None = None
) -> tuple[Factors, Tensor]:
    """The factors of rank k that cost the loss least, and all ``s²`` (min(d),); not in the paper.

    ``½ s_i²`` of ``G^{1/2} A Sigma^{1/2} = U s V^T`` is the loss that direction i is worth, with G
    (d_out, d_out) as `GradientMoments.second` gives it. The best B of rank k in ``E|G^{1/2} (A - B)
    x|²`` is ``G^{-1/2} U_k s_k V_k^T Sigma^{-1/2}``: C, M and W. W whitens x as eq. 7 does. With
    G = I it is the PCA of y, with Sigma = I too the SVD of A.
    """
    E, P = torch.linalg.eigh(G.to(x.mu))
    g, e = _floored(E.flip(0)).flip(0).sqrt(), _floored(x.E).sqrt()
    U, s, Vt = torch.linalg.svd((P * g) @ (P.T @ A.to(x.mu) @ x.P * e), full_matrices=False)
    k = len(s) if k is None else k
    C, W = (P / g) @ (P.T @ U[:, :k]), (Vt[:k] / e) @ x.P.T
    return Factors(W, torch.diag(s[:k]), C, x.mu, mu_y), s.square()


def mini_adaptation(
    M: MiniAdaptation,
    A: Tensor,
    W: Tensor,
    C: Tensor,
    Sigma: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """M (ky, kx) as it starts between W (kx, d_in) and C (d_out, ky)."""
    shape = C.shape[1], len(W)
    if M == "closed-form":
        return closed_form(A, W, C, Sigma)
    if M == "identity":
        return torch.eye(*shape).to(C)
    if M == "random":
        return (0.01 * torch.randn(*shape, generator=generator)).to(C)
    raise CovNormError(f"M={M!r}: {choices(M, get_args(MiniAdaptation))}")


def _floored(E: Tensor) -> Tensor:
    top = float(E[0])
    return E.clamp(min=EIGENVALUE_FLOOR * (top if top > 0 else 1 / EIGENVALUE_FLOOR))
