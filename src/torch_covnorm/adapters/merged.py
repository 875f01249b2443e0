"""Fold an adapter into the weight of its layer, for merging and where it makes inference faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .centre_tap import centre
from .fold import Folded
from .maps import product


def merged_weight(layer: nn.Conv2d | nn.Linear, folded: Folded) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a single layer that computes F followed by one folded adapter.

    ``W' = T W`` with ``T = gain + F_m … F_1``, plus ``G_l … G_1`` at the centre tap, and
    ``b' = T b + shift``. A grouped layer with factors gets an ungrouped weight.
    """
    weight = layer.weight.to(folded.shift)
    if isinstance(layer, nn.Linear):
        new = _times(folded, weight)
        if folded.parallel:
            new = new + product(folded.parallel)[0]
    else:
        if layer.groups > 1 and (folded.series or folded.parallel):
            weight = _ungrouped(weight, layer.groups)
        last = not weight.is_contiguous()  # channels_last: taps, then input channels
        taps = weight.movedim(1, -1) if last else weight
        new = _times(folded, taps.flatten(1)).view(taps.shape)
        new = new.movedim(-1, 1) if last else new
        if folded.parallel:
            row, column = centre(layer)
            new[:, :, row, column] += product(folded.parallel)[0]
    bias = folded.shift[0]
    if layer.bias is not None:
        bias = bias + _times(folded, layer.bias.to(bias)[:, None])[:, 0]
    return new, bias


def run_merged(layer: nn.Conv2d | nn.Linear, x: Tensor, folded: Folded) -> Tensor:
    """Return the layer's output with the adapter folded into its weight."""
    weight, bias = merged_weight(layer, folded)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight.to(x), bias.to(x))
    return layer._conv_forward(x, weight.to(x), bias.to(x))


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
    blocks = weight.chunk(groups)
    rows, columns = blocks[0].shape[:2]
    out = weight.new_zeros(rows * groups, columns * groups, *weight.shape[2:])
    for g, block in enumerate(blocks):
        out[g * rows : (g + 1) * rows, g * columns : (g + 1) * columns] = block
    return out
