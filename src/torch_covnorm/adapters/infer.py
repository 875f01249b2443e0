"""Run a site in eval mode: few passes over memory, one `bmm` per factor.

Where that is less work, and for merging, the adapter is folded into the weight of its layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fold import Folded
from .maps import product
from .site import Layer, base_forward, centre, centre_tap


def run_folded(layer: Layer, x: Tensor, folded: Folded, index: Tensor | None) -> Tensor:
    """Return the site's output for a batch x.

    index (n,): for each sample, the position of its expression in `folded`. None: there is one
    expression for all samples, or one per sample in the same order.
    """
    folded = folded.collapsed()
    if len(folded.shift) == 1 and merging_is_cheaper(layer, x):
        weight, bias = (t.to(x) for t in merged_weight(layer, folded))
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, bias)
        return layer._conv_forward(x, weight, bias)
    z = base_forward(layer, x)
    if index is not None:
        folded = folded.map(lambda t: t[index])
    spatial = isinstance(layer, nn.Conv2d)
    rows, last = _rows(z, spatial)
    out = _series(rows, folded, last)
    if folded.parallel:
        u, _ = _rows(centre_tap(layer, x, z), spatial, last)
        out = _add_(out, _through(u, folded.parallel[:-1], last), folded.parallel[-1], last)
    if last and spatial:
        return out.view(z.shape[0], *z.shape[2:], z.shape[1]).permute(0, 3, 1, 2)
    return out.view(z.shape)


def _rows(z: Tensor, spatial: bool, last: bool | None = None) -> tuple[Tensor, bool]:
    """Return a view (n, positions, d) if channels come last in memory, else (n, d, positions)."""
    if not spatial:
        return (z[:, None] if z.ndim == 2 else z.flatten(1, -2)), True
    if last is None:
        last = z.is_contiguous(memory_format=torch.channels_last) and not z.is_contiguous()
    return (z.permute(0, 2, 3, 1).flatten(1, 2), True) if last else (z.flatten(2), False)


def _series(rows: Tensor, folded: Folded, last: bool) -> Tensor:
    """Return gain · z + F_m … F_1 z + shift, in the memory of z unless a gradient needs z."""
    axis = 1 if last else 2
    shift = folded.shift.to(rows).unsqueeze(axis)
    if folded.gain is None:
        return _add(shift, rows, folded.series[0], last)
    gain = folded.gain.to(rows).unsqueeze(axis)
    hidden = _through(rows, folded.series[:-1], last) if folded.series else rows
    if torch.is_grad_enabled():
        out = torch.addcmul(shift, rows, gain)
    else:
        out = torch.addcmul(shift, rows, gain, out=rows)
    return _add_(out, hidden, folded.series[-1], last) if folded.series else out


def _through(rows: Tensor, factors: tuple[Tensor, ...], last: bool) -> Tensor:
    for factor in factors:
        one = factor[0] if len(factor) == 1 else factor
        rows = rows @ one.to(rows).mT if last else one.to(rows) @ rows
    return rows


def _add(shift: Tensor, rows: Tensor, factor: Tensor, last: bool) -> Tensor:
    """Return shift + factor · rows as a new tensor."""
    factor = factor.to(rows)
    if len(factor) == 1 and last:
        out = torch.addmm(shift[0], rows.flatten(0, 1), factor[0].T)
        return out.view(*rows.shape[:2], factor.shape[1])
    factor = factor.expand(len(rows), -1, -1)
    return torch.baddbmm(shift, *((rows, factor.mT) if last else (factor, rows)))


def _add_(out: Tensor, rows: Tensor, factor: Tensor, last: bool) -> Tensor:
    """Compute out += factor · rows in place."""
    rows, factor = rows.to(out), factor.to(out)  # their dtypes differ under autocast
    if len(factor) == 1 and last:
        out.flatten(0, 1).addmm_(rows.flatten(0, 1), factor[0].T)
        return out
    factor = factor.expand(len(rows), -1, -1)
    return out.baddbmm_(*((rows, factor.mT) if last else (factor, rows)))


def merged_weight(layer: Layer, folded: Folded) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a single layer that computes F followed by one folded adapter.

    ``W' = T W`` with ``T = gain + F_m … F_1``, plus ``G_l … G_1`` at the center tap, and
    ``b' = T b + shift``. A grouped layer with factors gets an ungrouped weight.
    """
    weight = layer.weight.to(folded.shift)
    if isinstance(layer, nn.Conv2d) and layer.groups > 1 and (folded.series or folded.parallel):
        weight = _ungrouped(weight, layer.groups)
    last = not weight.is_contiguous()  # channels_last: taps, then input channels
    taps = weight.movedim(1, -1) if last else weight
    new = _times(folded, taps.flatten(1)).view(taps.shape)
    new = new.movedim(-1, 1) if last else new
    if folded.parallel:
        tap = new[:, :, *centre(layer)] if isinstance(layer, nn.Conv2d) else new
        tap += product(folded.parallel)[0]
    bias = folded.shift[0]
    if layer.bias is not None:
        bias = bias + _times(folded, layer.bias.to(bias)[:, None])[:, 0]
    return new, bias


def merging_is_cheaper(layer: nn.Module, x: Tensor) -> bool:
    """Return whether the layer's weight has fewer numbers to transform than its output.

    Only layers of exactly these two classes qualify, because their forward is known.
    """
    if type(layer) is nn.Linear:
        return x.numel() // x.shape[-1] >= layer.in_features
    if type(layer) is not nn.Conv2d or layer.groups > 1:
        return False
    positions = x.numel() // (x.shape[1] * layer.stride[0] * layer.stride[1])
    return positions >= layer.weight[0].numel()


def _times(folded: Folded, matrix: Tensor) -> Tensor:
    """Return T · matrix (d, …), multiplying by one thin factor after the other."""
    if not folded.series:
        assert folded.gain is not None
        return folded.gain[0][:, None] * matrix
    out = product(tuple(f[0] for f in folded.series), matrix)
    return out if folded.gain is None else torch.addcmul(out, folded.gain[0][:, None], matrix)


def _ungrouped(weight: Tensor, groups: int) -> Tensor:
    """Expand (d_out, d_in/g, h, w) to (d_out, d_in, h, w) with zeros outside each group's block."""
    blocks, eye = weight.unflatten(0, (groups, -1)), torch.eye(groups).to(weight)
    return torch.einsum("gdchw,gk->gdkchw", blocks, eye).flatten(2, 3).flatten(0, 1)
