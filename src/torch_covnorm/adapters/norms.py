"""The batch norms B1 and B2 (eq. 9), and the scale and shift that any norm is in eval mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import CovNormError


class TokenNorm(nn.BatchNorm1d):
    """BatchNorm over the last axis of (…, d), for use after a Linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


def site_norm(spatial: bool, d: int) -> nn.Module:
    """Return a new norm for a site with d channels."""
    return nn.BatchNorm2d(d) if spatial else TokenNorm(d)


def scale_shift(norms: Sequence[nn.Module], d: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and shift (G, d) of G eval-mode norms, each of which is ``scale x + shift``.

    ``scale = gamma / sqrt(var + eps)``, ``shift = beta - mean scale``. For Identity: 1 and 0.
    """
    if not any(isinstance(n, _BatchNorm) for n in norms):
        return like.new_ones(len(norms), d), like.new_zeros(len(norms), d)
    one, zero = like.new_ones(d), like.new_zeros(d)
    *rows, eps = zip(*(_statistics(n, one, zero) for n in norms), strict=True)
    return _affine(rows, eps[0] if len(set(eps)) == 1 else like.new_tensor(eps)[:, None])


class NormTable(NamedTuple):
    """Scale and shift (G, D) of the eval-mode norms of G domains, concatenated over the norms.

    channels: by name of the norm, in the order of D.
    """

    channels: dict[str, int]
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, norms: Sequence[Mapping[str, _BatchNorm]], like: Tensor) -> NormTable:
        """Compute the table of the norms of G domains in a few operations.

        Norms without running statistics are left out. All domains share the backbone's eps.
        """
        known = {n: norm for n, norm in norms[0].items() if norm.running_mean is not None}
        channels = {n: norm.num_features for n, norm in known.items()}
        if not known:
            return cls({}, *like.new_zeros(2, len(norms), 0))
        filler = {n: (like.new_ones(d), like.new_zeros(d)) for n, d in channels.items()}
        rows = []
        for domain in norms:
            parts = [_statistics(domain[n], *filler[n]) for n in known]
            rows.append([torch.cat(column) for column in list(zip(*parts, strict=True))[:4]])
        eps = torch.cat([filler[n][0] * norm.eps for n, norm in known.items()])
        return cls(channels, *_affine(zip(*rows, strict=True), eps))

    def completed(self, norms: Mapping[str, nn.Module], like: Tensor) -> NormTable:
        """Return the table with the missing ones of these norms added, in their order."""
        missing = {n: norm for n, norm in norms.items() if n not in self.channels}
        if not missing:
            return self
        rest = NormTable.of([cast(Mapping[str, _BatchNorm], missing)], like)
        pieces = self.by_name() | {
            n: (scale.expand(len(self.scale), -1), shift.expand(len(self.scale), -1))
            for n, (scale, shift) in rest.by_name().items()
        }
        channels = {n: pieces[n][0].shape[1] for n in norms if n in pieces}
        scales, shifts = zip(*(pieces[n] for n in channels), strict=True)
        return NormTable(channels, torch.cat(scales, 1), torch.cat(shifts, 1))

    @classmethod
    def joined(cls, tables: Sequence[NormTable]) -> NormTable:
        """Return the table of all domains of several tables of one network."""
        scale, shift = torch.cat([t.scale for t in tables]), torch.cat([t.shift for t in tables])
        return cls(tables[0].channels, scale, shift)

    def by_name(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return {name: scale and shift (G, d)}."""
        sizes = list(self.channels.values())
        pieces = zip(self.scale.split(sizes, 1), self.shift.split(sizes, 1), strict=True)
        return dict(zip(self.channels, pieces, strict=True))


def _affine(columns: Iterable[Sequence[Tensor]], eps: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and shift (G, d) from G vectors of each of gamma, beta, mean and variance."""
    gamma, beta, mean, var = (c[0][None] if len(c) == 1 else torch.stack(tuple(c)) for c in columns)
    scale = gamma * (var + eps).rsqrt()
    return scale, beta - mean * scale


def _statistics(
    norm: nn.Module, one: Tensor, zero: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    if not isinstance(norm, _BatchNorm):
        return one, zero, zero, one, 0.0
    # nn.Module's own dictionaries: attribute lookup is slow, and a mixed batch does thousands.
    affine, running = norm._parameters, norm._buffers
    mean, var = running["running_mean"], running["running_var"]
    if mean is None or var is None:
        raise CovNormError(
            "a norm has no running statistics, so it is not a fixed scale and shift in eval mode: "
            "use norms with track_running_stats=True"
        )
    gamma, beta = affine["weight"], affine["bias"]
    return one if gamma is None else gamma, zero if beta is None else beta, mean, var, norm.eps
