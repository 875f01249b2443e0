"""The eigensolver and the SVD of the package: guarded, in float64, on the CPU.

LAPACK may fail to converge on matrices that are mostly zero or tiny, so it only ever sees the
live part of a matrix, scaled to 1, and has two fallbacks. A matrix with NaN or Inf is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import CovNormError

# Directions with less variance than this share of the largest are treated as if they had it. The
# scale cancels between W and M, so A is still reproduced exactly; it only keeps W's numbers small.
EIGENVALUE_FLOOR = 1e-7


def eigh(S: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues E (d,), largest first and never negative, and eigenvectors P (d, d).

    ``S = P E P^T`` for a covariance S. Dead channels (zero variance) are directions of their own.
    The largest entry of each column is positive, so the same S always gives the same P.
    """
    S = _checked(S)
    live, dead = (S.diagonal() > 0).nonzero()[:, 0], (S.diagonal() <= 0).nonzero()[:, 0]
    E, P = S.new_zeros(len(S)), torch.zeros_like(S)
    P[dead, len(live) + torch.arange(len(dead))] = 1
    if len(live):
        block = S[live][:, live]
        top = block.diagonal().max()
        solvers = (_eigh, functools.partial(_eigh, UPLO="U"), _eigh_by_svd)
        values, vectors = _first_that_converges(solvers, block / top, "eigendecomposition")
        E[: len(live)] = values.clamp(min=0) * top
        P[live, : len(live)] = vectors
    peak = P.gather(0, P.abs().argmax(0, keepdim=True))
    return E, P * torch.where(peak < 0, -1.0, 1.0)


def svd(A: Tensor, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, s (largest first) and V^T of ``A = U diag(s) V^T`` for A (m, n).

    `full`: U is (m, m) and V^T is (n, n), with zero directions at the end.
    """
    A = _checked(A)
    top = A.abs().max() if A.numel() else A.new_zeros(())
    scale = torch.where(top > 0, top, torch.ones_like(top))

    def plain(B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.linalg.svd(B, full_matrices=full)

    def transposed(B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        U, s, Vt = torch.linalg.svd(B.T, full_matrices=full)
        return Vt.T, s, U.T

    def nudged(B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return plain(B + 1e-14 * torch.eye(*B.shape).to(B))  # within the rounding of B

    solvers = (plain, transposed, nudged)
    U, s, Vt = _first_that_converges(solvers, A / scale, "singular value decomposition")
    return U, s * scale, Vt


def floored(E: Tensor) -> Tensor:
    """Raise eigenvalues (d,), largest first, to 1e-7 of the largest; if all are 0, to 1."""
    top = float(E[0])
    return E.clamp(min=EIGENVALUE_FLOOR * top) if top > 0 else torch.ones_like(E)


def roots(S: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``S^{1/2}`` and ``S^{-1/2}`` (d, d) of a covariance, its eigenvalues floored."""
    E, P = eigh(S)
    r = floored(E).sqrt()
    return (P * r) @ P.T, (P / r) @ P.T


def root(S: Tensor) -> Tensor:
    """Return ``S^{1/2}`` (d, d) of a covariance as it is, without a floor."""
    E, P = eigh(S)
    return (P * E.sqrt()) @ P.T


def pinv(A: Tensor, rtol: float | None = None) -> Tensor:
    """Return the pseudo-inverse (n, m) of A (m, n).

    Singular values below `rtol` (by default max(m, n) times float64's epsilon) of the largest
    count as zero.
    """
    U, s, Vt = svd(A)
    rtol = max(A.shape) * torch.finfo(s.dtype).eps if rtol is None else rtol
    kept = s > rtol * s.max() if len(s) else s > 0
    return (Vt[kept].T / s[kept]) @ U[:, kept].T


def _checked(S: Tensor) -> Tensor:
    S = S.detach().cpu().double()
    if not S.isfinite().all():
        raise CovNormError("the matrix to decompose contains NaN or Inf. Check the input images.")
    return S


def _first_that_converges(
    solvers: Sequence[Callable[[Tensor], tuple[Tensor, ...]]], S: Tensor, what: str
) -> tuple[Tensor, ...]:
    for solve in solvers:
        try:
            return solve(S)
        except torch.linalg.LinAlgError:
            continue
    raise CovNormError(f"{what} failed: the matrix is too ill-conditioned. Check the input images.")


def _eigh(S: Tensor, UPLO: str = "L") -> tuple[Tensor, Tensor]:
    E, P = torch.linalg.eigh(S, UPLO=UPLO)
    return E.flip(0), P.flip(1)


def _eigh_by_svd(S: Tensor) -> tuple[Tensor, Tensor]:
    U, E, _ = torch.linalg.svd(S)
    return E, U
