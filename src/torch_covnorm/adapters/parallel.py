"""Parallel adapter (Rebuffi 2018): a 1×1 path beside the layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .base import Adapter, base_forward
from .maps import LinearMap


class ParallelAdapter(Adapter):
    """``B2(F(x) + A(x))``: A is 1×1 with the layer's stride; no norm of its own before it.

    At a Conv2d the input of A is x under the centre tap of F's kernel, which for the usual "same"
    padding is x itself, strided. So A folds into the centre tap whatever the padding is.
    """

    kind = "parallel"
    A: LinearMap
    map_input = "input"

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        z = base_forward(layer, x)
        return self.B2(z + self.A(centre_tap(layer, x, z)))


def centre(layer: nn.Conv2d) -> tuple[int, int]:
    """Row and column of the kernel's centre tap."""
    rows, columns = layer.kernel_size
    return (rows - 1) // 2, (columns - 1) // 2


def centre_tap(layer: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    """What the centre tap of the layer sees: x (n, c, h, w) at one position for each of z's.

    For a Linear layer that is x.
    """
    if not isinstance(layer, nn.Conv2d):
        return x
    pads: list[int] = []
    for axis in (1, 0):  # F.pad wants the last axis first
        size, out = x.shape[2 + axis], z.shape[2 + axis]
        stride, tap = layer.stride[axis], layer.dilation[axis] * centre(layer)[axis]
        first = tap - _padding_before(layer, axis, size, out)
        pads += [-first, first + stride * (out - 1) + 1 - size]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if max(pads) > 0 and mode != "constant":  # outside x only where the tap is in the padding
        before = [max(p, 0) for p in pads]
        x = F.pad(x, before, mode=mode)
        pads = [min(p, 0) for p in pads]
    if any(pads):
        x = F.pad(x, pads)
    return x[:, :, :: layer.stride[0], :: layer.stride[1]]


def _padding_before(layer: nn.Conv2d, axis: int, size: int, out: int) -> int:
    """Zeros in front of x along an axis: as declared, or as its output size betrays.

    TensorFlow-style layers pad inside their forward, half of what is needed in front.
    """
    span = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
    if not isinstance(layer.padding, str):
        declared = int(layer.padding[axis])
        if (size + 2 * declared - span - 1) // layer.stride[axis] + 1 == out:
            return declared
    return max((out - 1) * layer.stride[axis] + span + 1 - size, 0) // 2
