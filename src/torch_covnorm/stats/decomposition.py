"""Decompose A by its data: ``A ≈ C M W`` (eq. 8). Tensors in, tensors out, in float64.

W whitens the input x of A, C colors with the statistics of its output y, and M aligns the two.
`decompose` does the work once per site; every rank is then a slice of its result. The metric is
the variance of y (the paper), or the loss, when G = E[g g^T] at the output is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..errors import CovNormError, check_choice
from . import solver
from .moments import Moments
from .pooling import LossMetric
from .ranks import RankRule, by_variance

MiniAdaptation = Literal["closed-form", "identity", "random"]


class PCA(NamedTuple):
    """The paper's (P, E, mu): eigenvectors (d, d) as columns, eigenvalues (d,), mean (d,)."""

    P: Tensor
    E: Tensor
    mu: Tensor

    @classmethod
    def of(cls, moments: Moments) -> PCA:
        """Return the PCA of some moments, on the CPU: ``Sigma = P E P^T`` (eq. 1)."""
        E, P = solver.eigh(moments.covariance)
        return cls(P, E, moments.mean.cpu().clone())  # the moments may go on changing in place


class Factors(NamedTuple):
    """``y ≈ C M W (x - mu_x) + mu_y`` (eq. 8): W (kx, d_in), M (ky, kx), C (d_out, ky)."""

    W: Tensor
    M: Tensor
    C: Tensor
    mu_x: Tensor
    mu_y: Tensor


def whiten(x: PCA) -> Tensor:
    """Return ``W = E^{-1/2} P^T`` (d, d), which whitens x (eq. 4, 5); its first k rows: eq. 7."""
    return x.P.T / solver.floored(x.E).sqrt()[:, None]


def color(y: PCA) -> Tensor:
    """Return ``C = P E^{1/2}`` (d, d), which colors w (eq. 4, 6); its first k columns: eq. 7."""
    return y.P * solver.floored(y.E).sqrt()


def closed_form(
    A: Tensor, W: Tensor, C: Tensor, Sigma: Tensor | None = None, root_G: Tensor | None = None
) -> Tensor:
    """Return ``M* = C^+ A W^+`` (ky, kx), the best M between given C and W; not in the paper.

    With the W and C of eq. 7 it is ``E_y^{-1/2} P_y^T A P_x E_x^{1/2}``; at full ranks C M* W is A.

    In joint mode W does not whiten the data of one domain, whose covariance of x is `Sigma` (d, d).
    What W drops of x is then correlated with what it keeps, and the best M accounts for it:
    ``M* + C^+ A (I - W^+ W) Sigma W^T (W Sigma W^T)^+``. In the metric of the loss, `root_G` is
    ``G^{1/2}`` (d_out, d_out), and C^+ is ``(G^{1/2} C)^+ G^{1/2}``.
    """
    A = A.to(C)
    C_inverse = solver.pinv(C) if root_G is None else solver.pinv(root_G @ C) @ root_G
    W_inverse = solver.pinv(W)
    if Sigma is not None and len(W) < W.shape[1]:
        kept, rest = W @ Sigma @ W.T, Sigma @ W.T - W_inverse @ (W @ Sigma @ W.T)
        W_inverse = W_inverse + rest @ solver.pinv(kept, rtol=1e-6)
    return C_inverse @ A @ W_inverse


def mini_adaptation(
    M: MiniAdaptation, closed: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return M (ky, kx) as it starts: `closed` itself, the identity, or Gaussian (std 0.01)."""
    check_choice("M", M, get_args(MiniAdaptation))
    if M == "closed-form":
        return closed
    if M == "identity":
        return torch.eye(*closed.shape).to(closed)
    return (0.01 * torch.randn(*closed.shape, generator=generator)).to(closed)


@dataclass(frozen=True)
class Bases:
    """Whitening of x and coloring of y, each with its directions in the order of their worth.

    W is (d_in, d_in) and C is (d_out, m). A direction of x is worth `x_worth` (d_in,) and one of y
    is worth `worth` (m,): its variance, or the loss it carries.
    """

    W: Tensor
    C: Tensor
    mu_x: Tensor
    x_worth: Tensor
    worth: Tensor

    def ranks(self, t: float, rule: RankRule = by_variance) -> tuple[int, int]:
        """Return (kx, ky): the directions that hold a share t of the worth, by a rank rule."""
        return rule(self.x_worth, t), rule(self.worth, t)


@dataclass(frozen=True)
class Decomposition(Bases):
    """A (d_out, d_in) between the statistics of its input and output; made by `decompose`.

    M (m, d_in) is the closed form at full ranks. Its upper left (ky, kx) block is the closed form
    for the first kx rows of W and ky columns of C, so a cut is a slice. In the metric of the loss
    the directions of x are ordered with those of y, so cuts keep all of them unless told otherwise.
    """

    M: Tensor
    mu_y: Tensor
    A: Tensor
    x: PCA
    in_loss: bool

    def cut(
        self,
        kx: int,
        ky: int,
        M: MiniAdaptation = "closed-form",
        generator: torch.Generator | None = None,
    ) -> Factors:
        """Return the factors of ranks kx, ky (eq. 8); M="identity" at full ranks: eq. 3 and 4."""
        mini = mini_adaptation(M, self.M[:ky, :kx], generator)
        return Factors(self.W[:kx], mini, self.C[:, :ky], self.mu_x, self.mu_y)

    def ranks(self, t: float, rule: RankRule = by_variance) -> tuple[int, int]:
        """Return (kx, ky) for a share t of the worth; in the loss metric kx is always d_in."""
        if self.in_loss:
            return len(self.W), rule(self.worth, t)
        return super().ranks(t, rule)

    @cached_property
    def spectra(self) -> dict[str, Tensor]:
        """Eigenvalues of "x" and of "y", and singular values of "A", largest first."""
        y = self.worth
        if self.in_loss:
            root = self.A @ (self.x.P * self.x.E.sqrt())
            y = torch.nn.functional.pad(solver.svd(root)[1].square(), (0, len(self.A) - len(y)))
        return {"x": self.x.E, "y": y, "A": solver.svd(self.A)[1]}


def decompose(
    A: Tensor,
    x: Moments,
    G: Tensor | None = None,
    *,
    b: Tensor | None = None,
    scaled: bool = True,
) -> Decomposition:
    """Decompose ``y = A x + b`` (eq. 8) by the moments of x, in the metric of y's variance or of G.

    Variance (G is None): W and C are those of the PCAs of x and y (eq. 7), and M is `closed_form`.
    `scaled=False` leaves the eigenvalues out of W and C, as the authors' program does.

    Loss: with G (d_out, d_out) = E[g g^T] at y and ``G^{1/2} A Sigma^{1/2} = U s V^T``, direction i
    is worth ``s_i²`` (``½ s_i²`` is the loss it carries). The best map of rank k in
    ``E|G^{1/2} (A - B) x|²`` has ``W = V^T Sigma^{-1/2}``, M the truncated identity and
    ``C = G^{-1/2} U s``: W whitens x and C colors y, as in eq. 7, whatever the scale of G.

    Args:
        A: (d_out, d_in).
        x: moments of the input.
        b: (d_out,), added to ``mu_y = A mu_x``.
    """
    A = A.detach().cpu().double()
    if not A.isfinite().all() or (b is not None and not b.isfinite().all()):
        raise CovNormError("A contains NaN or Inf: retrain the domain with a lower learning rate")
    pca = PCA.of(x)
    mu_y = A @ pca.mu + (0 if b is None else b.detach().cpu().double())
    if G is None:
        y = PCA.of(x.transform(A))
        W, C = (whiten(pca), color(y)) if scaled else (pca.P.T, y.P)
        # Columns of C and rows of W are orthogonal, so pseudo-inverses are scaled transposes.
        M = (C.T / C.square().sum(0)[:, None]) @ A @ (W.T / W.square().sum(1))
        worth = y.E
    else:
        scale, root, inverse = _scaled_roots(G)
        e = solver.floored(pca.E).sqrt()
        U, s, Vt = solver.svd(root @ A @ (pca.P * e), full=True)
        W, C = (Vt / e) @ pca.P.T, inverse @ U[:, : len(s)] * s
        M = torch.eye(len(s), len(W)).to(C)
        worth = s.square() * scale * (pca.E[0] > 0)  # without variance, the floor looks like worth
    bases = {"W": W, "C": C, "mu_x": pca.mu, "x_worth": pca.E, "worth": worth}
    return Decomposition(**bases, M=M, mu_y=mu_y, A=A, x=pca, in_loss=G is not None)


def _scaled_roots(G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest variance g of G, ``(G/g)^{1/2}`` and ``(G/g)^{-1/2}``."""
    G = G.detach().cpu().double()
    scale = G.diagonal().max()
    return scale, *solver.roots(G / scale if scale > 0 else G)


def pooled_bases(x: Moments, y: Moments, loss: LossMetric | None = None) -> Bases:
    """Return the bases that several domains share, from their pooled moments (eq. 10).

    Variance: the PCAs of x and y (eq. 7). Loss: with R and G summed in `loss`,
    ``Sigma_x^{1/2} R Sigma_x^{1/2} = V r V^T`` gives ``W = V^T Sigma_x^{-1/2}`` of worth r, and
    ``G^{1/2} Sigma_y G^{1/2} = U l U^T`` gives ``C = G^{-1/2} U l^{1/2}`` of worth l.
    """
    of_x = PCA.of(x)
    if loss is None:
        of_y = PCA.of(y)
        return Bases(whiten(of_x), color(of_y), of_x.mu, x_worth=of_x.E, worth=of_y.E)
    e = solver.floored(of_x.E).sqrt()
    r, V = solver.eigh((of_x.P * e).T @ loss.R.cpu() @ (of_x.P * e))
    W, x_worth = (V.T / e) @ of_x.P.T, r * (of_x.E[0] > 0)
    scale, root, inverse = _scaled_roots(loss.G)
    values, U = solver.eigh(root @ y.covariance.cpu() @ root)
    C = inverse @ U * solver.floored(values).sqrt()
    return Bases(W, C, of_x.mu, x_worth=x_worth, worth=values * scale)
