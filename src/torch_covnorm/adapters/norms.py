"""The batch normalisations B1 and B2, and what any eval-mode norm does: a scale and a shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import CovNormError


class TokenNorm(nn.BatchNorm1d):
    """BatchNorm over the last axis of (…, d): every position a row, as behind a Linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


def site_norm(spatial: bool, d: int) -> nn.Module:
    """A fresh norm for a site of d channels."""
    return nn.BatchNorm2d(d) if spatial else TokenNorm(d)


def scale_shift(norms: Sequence[nn.Module], d: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What each of G eval-mode norms does, ``scale x + shift``: two tensors (G, d).

    ``scale = gamma / sqrt(var + eps)``, ``shift = beta - mean scale``; Identity is 1 and 0.
    """
    if not any(isinstance(n, _BatchNorm) for n in norms):
        return like.new_ones(len(norms), d), like.new_zeros(len(norms), d)
    one, zero = like.new_ones(d), like.new_zeros(d)
    gamma, beta, mean, var, eps = zip(*(_statistics(n, one, zero) for n in norms), strict=True)
    shared: float | Tensor = eps[0] if len(set(eps)) == 1 else like.new_tensor(eps)[:, None]
    scale = _stack(gamma) * (_stack(var) + shared).rsqrt()
    return scale, _stack(beta) - _stack(mean) * scale


def _stack(vectors: tuple[Tensor, ...]) -> Tensor:
    return vectors[0][None] if len(vectors) == 1 else torch.stack(vectors)


def _statistics(
    norm: nn.Module, one: Tensor, zero: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    if not isinstance(norm, _BatchNorm):
        return one, zero, zero, one, 0.0
    if norm.running_mean is None or norm.running_var is None:
        raise CovNormError("a norm without running statistics is no scale and shift")
    gamma, beta = (one, zero) if norm.weight is None else (norm.weight, norm.bias)
    return gamma, beta, norm.running_mean, norm.running_var, norm.eps
