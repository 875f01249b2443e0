"""Random crops and flips of a batch of images, for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError, check_integer, choices

FILLS = ("zeros", "reflect")


@dataclass(frozen=True)
class Augment:
    """Random crop and flip of a batch, drawn separately for every sample.

    Pass ``Augment(crop=64)``, or for small images ``Augment(padding=4)``, as ``augment=``.

    Args:
        crop: side of the result in pixels; None keeps the size of the images, for use with padding.
        padding: pixels added on each side before the crop.
        fill: the padding: "zeros", or "reflect", which does not repeat the edge itself.
        flip: probability of a left-right flip; use 0 for digits, letters and traffic signs.
    """

    crop: int | None = None
    padding: int = 0
    fill: str = "zeros"
    flip: float = 0.5

    def __post_init__(self) -> None:
        if self.crop is not None:
            check_integer("crop", self.crop)
        check_integer("padding", self.padding, 0)
        if self.fill not in FILLS:
            raise CovNormError(f"fill={self.fill!r}: {choices(self.fill, FILLS)}")
        if not 0 <= self.flip <= 1:
            raise CovNormError(f"flip={self.flip!r}: must be a probability between 0 and 1")

    def __call__(self, images: Tensor) -> Tensor:
        """Augment (n, c, h, w) → (n, c, crop, crop). Dtype, device and channels_last are kept."""
        if images.ndim != 4:
            raise CovNormError(f"images are {tuple(images.shape)}: must be a batch (n, c, h, w)")
        n, c, h, w = images.shape
        last = images.is_contiguous(memory_format=torch.channels_last)
        last = last and not images.is_contiguous()
        rows, cols = self._positions(n, h, "high"), self._positions(n, w, "wide")
        cols = torch.where(torch.rand(n, 1) < self.flip, cols.flip(1), cols)
        if self.padding and self.fill == "zeros":
            images = F.pad(images, [self.padding] * 4)
        # One gather does crop and flip. It is faster than a loop and works in any dtype.
        index = (rows[:, :, None] * images.shape[3] + cols[:, None, :]).flatten(1)
        index = index.to(images.device)[:, None].expand(-1, c, -1)
        out = images.flatten(2).gather(2, index).unflatten(2, (rows.shape[1], cols.shape[1]))
        return out.contiguous(memory_format=torch.channels_last) if last else out

    def _positions(self, n: int, side: int, direction: str) -> Tensor:
        """Return the pixels of each sample along one side (n, crop), with padded zeros counted."""
        size = side if self.crop is None else self.crop
        room = side + 2 * self.padding - size
        if room < 0:
            raise CovNormError(
                f"crop={size} does not fit into images {side} pixels {direction} with padding "
                f"{self.padding}. Use a smaller crop or more padding."
            )
        if self.fill == "reflect" and self.padding >= side:
            images = f"images {side} pixels {direction}"
            raise CovNormError(f"padding={self.padding} cannot reflect {images}. Use less.")
        index = torch.randint(room + 1, (n, 1)) + torch.arange(size)
        if self.fill == "zeros":
            return index
        index = (index - self.padding).abs()  # F.pad does not reflect bytes
        return torch.where(index < side, index, 2 * (side - 1) - index)
