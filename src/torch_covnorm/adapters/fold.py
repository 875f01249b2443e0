"""What adapters do in eval mode, in one form for every kind; used by inference and by merging.

In eval mode B1 and B2 are affine, so each adapter of a site, whatever its structure, is

    out = gain · z + F_m … F_1 z + G_l … G_1 u + shift,      z = F(x), u = x under F's centre tap

with the F's of series adapters, the G's of parallel ones. The forms of several domains stack, and
one batch can then take each sample through its own domain's form with one `bmm` a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import Adapter, frozen
from .norms import scale_shift
from .parallel import centre_tap


@dataclass(frozen=True)
class Folded:
    """The eval-mode forms of G adapters: gain, shift (G, d_out); factors (G, k_i, k_{i-1})."""

    gain: Tensor
    shift: Tensor
    series: tuple[Tensor, ...]
    parallel: tuple[Tensor, ...]

    def take(self, index: Tensor) -> Folded:
        """The forms of a batch: index (n,) names each sample's adapter."""
        return Folded(
            self.gain[index],
            self.shift[index],
            tuple(f[index] for f in self.series),
            tuple(f[index] for f in self.parallel),
        )


def fold(adapters: Sequence[Adapter], d_in: int, d_out: int, like: Tensor) -> Folded:
    """Stack the eval-mode forms of a site's adapters, B1 multiplied into F_1 and B2 into F_m.

    ``B2(r z + A (s1 u + t1) + b) = s2 r z + (s2 A s1) u + s2 (A t1 + b) + t2``
    """
    s2, t2 = scale_shift([a.B2 for a in adapters], d_out, like)
    residual = like.new_tensor([float(a.residual) for a in adapters])[:, None]
    shift = t2
    chains: dict[str, tuple[Tensor, ...]] = {}
    for source, d in (("output", d_out), ("input", d_in)):
        maps = [a.A if a.map_input == source else None for a in adapters]
        factors = _stack([None if A is None else A.factors for A in maps], like)
        if factors:
            zero = like.new_zeros(d_out)
            constant = torch.stack([zero if A is None else A.offset for A in maps])
            pairs = zip(adapters, maps, strict=True)
            before = [nn.Identity() if A is None else a.B1 for a, A in pairs]
            if any(not isinstance(B1, nn.Identity) for B1 in before):
                s1, t1 = scale_shift(before, d, like)
                constant = constant + _chain(t1[:, :, None], factors)[:, :, 0]
                factors = (factors[0] * s1[:, None, :], *factors[1:])
            if any(not isinstance(a.B2, nn.Identity) for a in adapters):
                constant = constant * s2
                factors = (*factors[:-1], factors[-1] * s2[:, :, None])
            shift = shift + constant
        chains[source] = factors
    return Folded(s2 * residual, shift, chains["output"], chains["input"])


def run_folded(layer: nn.Module, x: Tensor, folded: Folded, index: Tensor | None) -> Tensor:
    """The site's output for a batch x.

    index (n,) names each sample's form; None: one form for all, or one a sample in their order.
    """
    z = frozen(layer, x)
    if index is not None:
        folded = folded.take(index)
    u = centre_tap(layer, x, z) if folded.parallel else None
    spatial = isinstance(layer, nn.Conv2d)
    rows, last = _rows(z, spatial)
    out = _affine_(rows, folded, last)
    if u is not None:
        hidden = _hidden(_rows(u, spatial, last)[0], folded.parallel, last)
        _accumulate_(out, hidden, folded.parallel[-1], last)
    if last and spatial:
        return out.view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
    return out.view(z.shape)


def padded_share(adapters: Sequence[Adapter]) -> float:
    """The share of a mixed batch's multiplications that zero-padding of unequal ranks wastes."""
    chains = [tuple(a.A.factors) for a in adapters if a.A is not None]
    if not chains:
        return 0.0
    used = sum(f.numel() for chain in chains for f in chain)
    padded = sum(f.numel() for f in _stack(chains, chains[0][0]))
    return 1 - used / padded


def _rows(z: Tensor, spatial: bool, last: bool | None = None) -> tuple[Tensor, bool]:
    """(n, positions, d) where channels come last in memory, else (n, d, positions); a view."""
    if not spatial:
        return z.reshape(z.shape[0], -1, z.shape[-1]), True
    if last is None:
        last = z.is_contiguous(memory_format=torch.channels_last) and not z.is_contiguous()
    return (z.permute(0, 2, 3, 1).flatten(1, 2), True) if last else (z.flatten(2), False)


def _affine_(rows: Tensor, folded: Folded, last: bool) -> Tensor:
    """gain · z + series chain of z + shift; into z's own memory where no gradient needs it."""
    axis = 1 if last else 2
    gain, shift = folded.gain.to(rows).unsqueeze(axis), folded.shift.to(rows).unsqueeze(axis)
    hidden = _hidden(rows, folded.series, last)
    if torch.is_grad_enabled() or hidden is rows:
        out = torch.addcmul(shift, rows, gain)
    else:
        out = torch.addcmul(shift, rows, gain, out=rows)
    return _accumulate_(out, hidden, folded.series[-1], last) if folded.series else out


def _hidden(rows: Tensor, factors: tuple[Tensor, ...], last: bool) -> Tensor:
    """rows behind all factors but the last; rows itself where there is just one."""
    if not factors:
        return rows.new_empty(0)
    for factor in factors[:-1]:
        factor = factor.to(rows)
        if len(factor) == 1:
            rows = rows @ factor[0].T if last else factor[0] @ rows
        else:
            rows = rows @ factor.mT if last else factor @ rows
    return rows


def _accumulate_(out: Tensor, hidden: Tensor, factor: Tensor, last: bool) -> Tensor:
    """out += factor · hidden, in place: out is ours."""
    factor = factor.to(hidden)
    if len(factor) == 1 and last:
        out.flatten(0, 1).addmm_(hidden.flatten(0, 1), factor[0].T)
        return out
    factor = factor.expand(len(out), -1, -1)
    return out.baddbmm_(hidden, factor.mT) if last else out.baddbmm_(factor, hidden)


def _stack(chains: Sequence[tuple[Tensor, ...] | None], like: Tensor) -> tuple[Tensor, ...]:
    """Stack chains of factors (k_i, k_{i-1}): shorter chains get identities, ranks get zeros.

    A missing chain is all zeros; none at all gives none.
    """
    present = [c for c in chains if c is not None]
    if not present:
        return ()
    length = max(map(len, present))
    d_out = len(present[0][-1])
    eye = torch.eye(d_out, dtype=like.dtype, device=like.device)
    full = [c and c + (eye,) * (length - len(c)) for c in chains]
    return tuple(_pad([c[i] if c else None for c in full], like) for i in range(length))


def _pad(matrices: Sequence[Tensor | None], like: Tensor) -> Tensor:
    shapes = {m.shape for m in matrices if m is not None}
    if len(shapes) == 1 and None not in matrices:
        return torch.stack([m for m in matrices if m is not None])
    rows, columns = (max(s[i] for s in shapes) for i in (0, 1))
    out = like.new_zeros(len(matrices), rows, columns)
    for i, m in enumerate(matrices):
        if m is not None:
            out[i, : m.shape[0], : m.shape[1]] = m
    return out


def _chain(v: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    for factor in factors:
        v = factor @ v
    return v
