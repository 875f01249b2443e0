"""The matrix A of an adapter, in its three forms: full, low-rank C·W, and CovNorm C·M·W.

Each is ``y = A x + b`` on the channels of a Conv2d site's (n, d, h, w) or a Linear site's (…, d).
A map lists its factors from right to left, in the order in which they are applied to x.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..stats.decomposition import Factors

FRESH = 1e-3  # standard deviation of the entries of an untrained A


def product(factors: Sequence[Tensor], v: Tensor | None = None) -> Tensor:
    """Return F_m … F_1 v, or without v the product of the factors."""
    out, rest = (factors[0], factors[1:]) if v is None else (v, factors)
    for factor in rest:
        out = factor @ out
    return out


class LinearMap(nn.Module):
    """``y = F_m … F_1 (x - centre) + b``. Subclasses define the factors."""

    form: str
    order: tuple[str, ...]  # names of F_1, …, F_m

    def __init__(self, spatial: bool, d_out: int) -> None:
        super().__init__()
        self.spatial = spatial
        self.bias = nn.Parameter(torch.zeros(d_out))

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """F_1, …, F_m: each (k_i, k_{i-1}), with k_0 = d_in and k_m = d_out."""
        return tuple(getattr(self, name) for name in self.order)

    @property
    def centre(self) -> Tensor | None:
        """mu_x (d_in,) if the map is applied to x - mu_x, else None."""
        return None

    @property
    def offset(self) -> Tensor:
        """The output (d_out,) for x = 0."""
        return self.bias if self.centre is None else self.bias - product(self.factors, self.centre)

    @property
    def ranks(self) -> list[int]:
        """The inner dimensions k_1 … k_{m-1}. With the site, they determine all shapes."""
        return [len(f) for f in self.factors[:-1]]

    def matrix(self) -> Tensor:
        """Return the product F_m … F_1 (d_out, d_in)."""
        return product(self.factors)

    def forward(self, x: Tensor) -> Tensor:
        factors, first = self.factors, None
        if 0 in self.ranks:  # only the constant is left
            like = x.mean(1, keepdim=True) if self.spatial else x.mean(-1, keepdim=True)
            bias = self.bias[:, None, None] if self.spatial else self.bias
            return torch.zeros_like(like) + bias.to(x)
        if self.centre is not None:
            first = -(factors[0] @ self.centre)
        for factor in factors[:-1]:
            x, first = self._through(x, factor, first), None
        return self._through(x, factors[-1], self.bias)

    def _through(self, x: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
        if self.spatial:
            return F.conv2d(x, factor[:, :, None, None], bias)
        return F.linear(x, factor, bias)

    @property
    def trains(self) -> list[str]:
        """Names of the trainable parameters."""
        return [name for name, p in self.named_parameters() if p.requires_grad]

    def train_only_(self, names: Iterable[str]) -> None:
        """Make these parameters trainable, and no others."""
        chosen = set(names)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in chosen)

    def paper_count(self) -> int:
        """Return the number of parameters as the paper counts them: matrices, not biases.

        Matrices that are shared or constant do not count.
        """
        return sum(p.numel() for name, p in self.named_parameters() if name != "bias")

    def absorbed(self) -> LowRankMap:
        """Return an equal map of two factors: C and ``M W`` if kx > ky, else ``C M`` and W.

        It has ``(d_in + d_out) min(kx, ky)`` parameters: the paper's 2 d min(kx, ky) for a square
        A. This map must have two or three factors.

        Each column of C is scaled to a largest entry of 1 and the row of W accordingly: int8 files
        keep one scale per row, which would round columns of very unequal size to zeros.
        """
        with torch.no_grad():
            W, *middle, C = (f.detach().cpu().double() for f in self.factors)
            for M in middle:
                W, C = (M @ W, C) if len(W) > C.shape[1] else (W, C @ M)
            bias = self.bias.cpu().double()
            if self.centre is not None:
                bias = bias - C @ (W @ self.centre.cpu().double())
            scale = C.abs().amax(0) if len(W) else C.new_ones(0)
            scale = torch.where(scale > 0, scale, 1.0)
            C, W = C / scale, W * scale[:, None]
            return LowRankMap.of(self.spatial, C, W, bias.to(self.bias))


class FullMap(LinearMap):
    """A (d_out, d_in), with Gaussian initial values as in the paper.

    The paper does not state their standard deviation, and the authors' program uses 0.01. Here it
    is ten times smaller, so that training and not the initial noise determines the spectrum of y.
    """

    form = "full"
    order = ("A",)

    def __init__(self, spatial: bool, d_in: int, d_out: int) -> None:
        super().__init__(spatial, d_out)
        self.A = nn.Parameter(FRESH * torch.randn(d_out, d_in))


class LowRankMap(LinearMap):
    """C W with C (d_out, r) and W (r, d_in): 2 r d parameters, Gaussian at first (FTA)."""

    form = "lowrank"
    order = ("W", "C")

    def __init__(self, spatial: bool, d_in: int, d_out: int, r: int) -> None:
        super().__init__(spatial, d_out)
        # W preserves the variance of x, and C is as small as a new A: y starts as small as RA's.
        self.W = nn.Parameter(torch.randn(r, d_in) / d_in**0.5)
        self.C = nn.Parameter(FRESH * torch.randn(d_out, r))

    @classmethod
    def of(cls, spatial: bool, C: Tensor, W: Tensor, bias: Tensor) -> LowRankMap:
        """Return the map with these factors, in the dtype of the bias."""
        new = cls(spatial, W.shape[1], len(C), len(W)).to(bias)
        new.load_state_dict({"W": W, "C": C, "bias": bias})
        return new


class CovNormMap(LinearMap):
    """``C M W (x - mu_x) + mu_y`` (eq. 8): W (kx, d_in), M (ky, kx), C (d_out, ky).

    mu_x is a buffer, so W whitens centered features (eq. 5). mu_y is the bias that C adds (eq. 6).
    """

    form = "covnorm"
    order = ("W", "M", "C")

    def __init__(self, spatial: bool, d_in: int, d_out: int, kx: int, ky: int) -> None:
        super().__init__(spatial, d_out)
        self.W = nn.Parameter(torch.zeros(kx, d_in))
        self.M = nn.Parameter(torch.zeros(ky, kx))
        self.C = nn.Parameter(torch.zeros(d_out, ky))
        self.mu_x: Tensor
        self.register_buffer("mu_x", torch.zeros(d_in))

    @classmethod
    def from_factors(cls, spatial: bool, factors: Factors) -> CovNormMap:
        """Return the map of eq. 8 with these factors, in their dtype."""
        (kx, d_in), (d_out, ky) = factors.W.shape, factors.C.shape
        new = cls(spatial, d_in, d_out, kx, ky).to(factors.W)
        new.load_state_dict(dict(zip(("W", "M", "C", "mu_x", "bias"), factors, strict=True)))
        return new

    @property
    def centre(self) -> Tensor:
        return self.mu_x


FORMS = {m.form: m for m in (FullMap, LowRankMap, CovNormMap)}
