"""The eval-mode expression of an adapter, the same for every kind.

In eval mode B1 and B2 are affine, so any adapter of a site computes

    out = gain · z + F_m … F_1 z + G_l … G_1 u + shift,      z = F(x), u = x at F's center tap

Series adapters have factors F, parallel adapters have factors G. The expressions of several domains
stack. A batch can then take each sample through its domain's expression, with one `bmm` per factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .kinds import Adapter
from .maps import product
from .norms import scale_shift
from .site import Site


@dataclass(frozen=True)
class Folded:
    """The expressions of G adapters: gain and shift (G, d_out), factors (G, k_i, k_{i-1}).

    The gain is None if the single series factor contains it on its diagonal (`collapsed`).
    """

    gain: Tensor | None
    shift: Tensor
    series: tuple[Tensor, ...]
    parallel: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        gain = [] if self.gain is None else [self.gain]
        return [*gain, self.shift, *self.series, *self.parallel]

    def map(self, fn: Callable[[Tensor], Tensor]) -> Folded:
        """Return the same with `fn` applied to every tensor."""
        return Folded(
            None if self.gain is None else fn(self.gain),
            fn(self.shift),
            tuple(map(fn, self.series)),
            tuple(map(fn, self.parallel)),
        )

    def collapsed(self) -> Folded:
        """Return the series as one dense factor, gain included, where that is less work."""
        gain, series = self.gain, self.series
        if gain is None:
            return self
        rank = min((f.shape[2] for f in series[1:]), default=0)
        if len(gain) == 1 and 2 * rank >= gain.shape[1]:
            series = (product(series),)
        if len(series) == 1:
            series, gain = (series[0] + torch.diag_embed(gain),), None
        return Folded(gain, self.shift, series, self.parallel)


def fold(adapters: Sequence[Adapter], site: Site, like: Tensor) -> Folded:
    """Return the expressions of G adapters of one site: B1 goes into F_1, and B2 into F_m.

    ``B2(r z + A (s1 u + t1) + b) = s2 r z + (s2 A s1) u + s2 (A t1 + b) + t2``
    """
    s2, shift = scale_shift([a.B2 for a in adapters], site.d_out, like)
    gain = s2
    if not all(a.residual for a in adapters):
        gain = s2 * like.new_tensor([float(a.residual) for a in adapters])[:, None]
    chains: dict[str, tuple[Tensor, ...]] = {}
    for source, d in (("output", site.d_out), ("input", site.d_in)):
        maps = [a.A if a.map_input == source else None for a in adapters]
        factors = _stack_chains([None if A is None else A.factors for A in maps], like)
        if factors:
            zero = like.new_zeros(site.d_out)
            constant = torch.stack([zero if A is None else A.offset for A in maps])
            before = [a.B1 if A else nn.Identity() for a, A in zip(adapters, maps, strict=True)]
            if any(not isinstance(B1, nn.Identity) for B1 in before):
                s1, t1 = scale_shift(before, d, like)
                constant = constant + _chain_times(factors, t1)
                factors = (factors[0] * s1[:, None, :], *factors[1:])
            if any(not isinstance(a.B2, nn.Identity) for a in adapters):
                constant = constant * s2
                factors = (*factors[:-1], factors[-1] * s2[:, :, None])
            shift = shift + constant
        chains[source] = () if any(0 in f.shape for f in factors) else factors
    return Folded(gain, shift, chains["output"], chains["input"])


def stack(parts: Sequence[Folded], like: Tensor) -> Folded:
    """Stack expressions that `fold` returned for one adapter each (G = 1)."""
    if len(parts) == 1:
        return parts[0]
    gains = [p.gain for p in parts if p.gain is not None]
    series, parallel = (
        _stack_chains([[f[0] for f in chain] or None for chain in chains], like)
        for chains in ([p.series for p in parts], [p.parallel for p in parts])
    )
    return Folded(torch.cat(gains), torch.cat([p.shift for p in parts]), series, parallel)


def padded_share(adapters: Sequence[Adapter]) -> float:
    """Return the share of a mixed batch's multiplications that zero padding wastes."""
    used = padded = 0
    for source in ("output", "input"):
        chains = [a.A.factors if a.A and a.map_input == source else None for a in adapters]
        present = [c for c in chains if c is not None]
        used += sum(f.numel() for c in present for f in c)
        padded += sum(f.numel() for f in _stack_chains(chains, present[0][0])) if present else 0
    return 1 - used / padded if padded else 0.0


def _chain_times(factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
    """Return F_m … F_1 v for vectors (G, k_0)."""
    if len(v) > 1:
        return product(factors, v[:, :, None])[:, :, 0]
    for factor in factors:  # for a single domain, `bmm` would start threads for little work
        v = (factor * v[:, None, :]).sum(2)
    return v


def _stack_chains(chains: Sequence[Sequence[Tensor] | None], like: Tensor) -> tuple[Tensor, ...]:
    """Stack chains of factors (k_i, k_{i-1}): pad short chains with identities, ranks with zeros.

    A missing chain becomes zeros. If all are missing, return no factors.
    """
    present = [c for c in chains if c is not None]
    if not present:
        return ()
    length = max(map(len, present))
    if any(len(c) < length for c in present):
        eye = torch.eye(len(present[0][-1]), dtype=like.dtype, device=like.device)
        chains = [c and (*c, *(eye,) * (length - len(c))) for c in chains]
    return tuple(_stack_padded([c[i] if c else None for c in chains], like) for i in range(length))


def _stack_padded(matrices: Sequence[Tensor | None], like: Tensor) -> Tensor:
    present = [m for m in matrices if m is not None]
    if len(matrices) == len(present) == 1:
        return present[0][None]
    shapes = {m.shape for m in present}
    if len(present) == len(matrices) and len(shapes) == 1:
        return torch.stack(present)
    rows, columns = (max(s[i] for s in shapes) for i in (0, 1))
    out = like.new_zeros(len(matrices), rows, columns)
    for i, m in enumerate(matrices):
        if m is not None:
            out[i, : m.shape[0], : m.shape[1]] = m
    return out
