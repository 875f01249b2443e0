"""A site: one adapted layer F of the backbone, its output F(x), and what its center tap reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

Layer = nn.Conv2d | nn.Linear


@dataclass(frozen=True)
class Site:
    """A Conv2d or Linear layer that is adapted, with d_in input and d_out output channels."""

    name: str
    spatial: bool  # Conv2d; else Linear
    d_in: int
    d_out: int
    norm_behind: str | None  # the BatchNorm that follows in the backbone: it serves as B2


def base_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Return F(x): call the forward of the layer's class, which bypasses routing."""
    return type(layer).forward(layer, x)


def centre(layer: nn.Conv2d) -> tuple[int, int]:
    """Return row and column of the kernel's center tap."""
    rows, columns = layer.kernel_size
    return (rows - 1) // 2, (columns - 1) // 2


def centre_tap(layer: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    """Return what the layer's center tap reads of x (n, c, h, w), one position per position of z.

    For a Linear layer this is x.
    """
    if not isinstance(layer, nn.Conv2d):
        return x
    pads: list[int] = []
    for axis in (1, 0):  # F.pad expects the last axis first
        size, out = x.shape[2 + axis], z.shape[2 + axis]
        stride, tap = layer.stride[axis], layer.dilation[axis] * centre(layer)[axis]
        first = tap - _padding_before(layer, axis, size, out)
        pads += [-first, first + stride * (out - 1) + 1 - size]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if max(pads) > 0 and mode != "constant":  # the tap reads the padding at some positions
        x = F.pad(x, [max(p, 0) for p in pads], mode=mode)
        pads = [min(p, 0) for p in pads]
    if any(pads):
        x = F.pad(x, pads)
    return x[:, :, :: layer.stride[0], :: layer.stride[1]]


def _padding_before(layer: nn.Conv2d, axis: int, size: int, out: int) -> int:
    """Return the padding before x along an axis: as declared, or else as the output size implies.

    TensorFlow-style layers pad inside their forward: half of what is needed comes first.
    """
    span = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
    if not isinstance(layer.padding, str):
        declared = int(layer.padding[axis])
        if (size + 2 * declared - span - 1) // layer.stride[axis] + 1 == out:
            return declared
    return max((out - 1) * layer.stride[axis] + span + 1 - size, 0) // 2
