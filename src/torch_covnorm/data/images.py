"""Images as tensors: resizing, cropping, flipping, and their channel statistics.

A single image is (3, h, w), uint8 until it is normalised. What is random draws from torch's
global generator on the CPU, so one seed gives the same pictures on every device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError, choices

Statistics = tuple[list[float], list[float]]
PADDINGS = ("zeros", "reflect")


def resize(image: Tensor, n: int) -> Tensor:
    """The shorter side to n pixels: (c, h, w) → (c, h', w'), in the image's dtype.

    Bilinear with antialiasing, the longer side rounded down. uint8 on the CPU is Pillow's result
    but for one level in a pixel of a hundred.
    """
    _check_image(image)
    _check_size(n)
    h, w = image.shape[-2:]
    if min(h, w) == n:
        return image
    size = (n, n * w // h) if h <= w else (n * h // w, n)
    # torch has Pillow's own arithmetic for bytes, rounding between its passes, on the CPU alone.
    native = image.dtype == torch.uint8 and image.device.type == "cpu"
    x = image if native or image.is_floating_point() else image.float()
    out = F.interpolate(x[None], size=size, mode="bilinear", antialias=True)[0]
    return out if out.dtype == image.dtype else out.round_().to(image.dtype)


def centre_crop(image: Tensor, n: int) -> Tensor:
    """The middle n × n pixels: (…, h, w) → (…, n, n). Half a pixel goes to the even offset."""
    h, w = _room(image, n)
    top, left = round(h / 2), round(w / 2)
    return image[..., top : top + n, left : left + n]


def random_crop(image: Tensor, n: int) -> Tensor:
    """n × n pixels from anywhere, each place as likely: (…, h, w) → (…, n, n)."""
    h, w = _room(image, n)
    top, left = int(torch.randint(h + 1, ())), int(torch.randint(w + 1, ()))
    return image[..., top : top + n, left : left + n]


def random_flip(image: Tensor, p: float = 0.5) -> Tensor:
    """Left and right exchanged with probability p: (…, h, w) → (…, h, w)."""
    return image.flip(-1) if float(torch.rand(())) < p else image


def normalise(image: Tensor, mean: Iterable[float], std: Iterable[float]) -> Tensor:
    """``(x / 255 - mean) / std`` by channel: uint8 (3, h, w) → float32 (3, h, w)."""
    m, s = torch.tensor([list(mean), list(std)], dtype=torch.float32)[:, :, None, None]
    return (image.float() / 255 - m) / s


def channel_statistics(images: Iterable[Tensor]) -> Statistics:
    """Mean and standard deviation of each channel, over every pixel of uint8 images (3, h, w).

    On a scale of 0 to 1, as `normalise` wants them. The sums are whole numbers, so nothing rounds
    before the last division and the order of the images does not matter.
    """
    n, sums, squares = 0, [0, 0, 0], [0, 0, 0]
    for image in images:
        _check_image(image)
        if image.dtype != torch.uint8 or len(image) != 3:
            raise CovNormError(
                f"an image is {image.dtype} {tuple(image.shape)}: statistics need uint8 (3, h, w)"
            )
        x = image.flatten(1).long()
        n += x.shape[1]
        sums = [a + b for a, b in zip(sums, x.sum(1).tolist(), strict=True)]
        squares = [a + b for a, b in zip(squares, (x * x).sum(1).tolist(), strict=True)]
    if n == 0:
        raise CovNormError("mean and std of no images: give at least one")
    mean = [s / (255 * n) for s in sums]
    variance = [(n * q - s * s) / (255 * n) ** 2 for s, q in zip(sums, squares, strict=True)]
    return mean, [v**0.5 for v in variance]


def check_statistics(entry: Any, what: str) -> Statistics:
    """Mean and std of ``{"mean": [r, g, b], "std": [r, g, b]}``, or an error that names `what`."""
    try:
        values = torch.tensor([list(entry["mean"]), list(entry["std"])], dtype=torch.float64)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise CovNormError(f"{what}: need {{'mean': [r, g, b], 'std': [r, g, b]}}") from error
    if values.shape != (2, 3) or not values.isfinite().all() or (values[1] <= 0).any():
        raise CovNormError(
            f"{what}: mean and std are {values.tolist()}: need three finite numbers each, and "
            "std above 0; a channel that never varies needs statistics= by hand"
        )
    mean, std = values.tolist()
    return mean, std


@dataclass(frozen=True)
class Rule:
    """How an image becomes the network's input: shorter side, crop, and what training varies."""

    resize: int = 72
    crop: int = 64
    random_crop: bool = True
    flip: bool = True

    def __call__(self, image: Tensor, train: bool) -> Tensor:
        """uint8 (3, h, w) → uint8 (3, crop, crop); at random where `train`, else the centre."""
        image = resize(image, self.resize)
        crop = random_crop if train and self.random_crop else centre_crop
        image = crop(image, self.crop)
        return random_flip(image) if train and self.flip else image


@dataclass(frozen=True)
class Augment:
    """Augmentation of a batch: a crop and a flip of its own for every sample.

    ``Augment(crop=64)`` or, for images that are small already, ``Augment(padding=4)``; an
    instance goes to a training loop as ``augment=``.

    Args:
        crop: side of the result in pixels; None keeps the images' size, for use with padding.
        padding: pixels added on each side before the crop.
        fill: what they are: "zeros" or "reflect" (the edge itself is not repeated).
        flip: probability of exchanging left and right; 0 for digits, letters and traffic signs.
    """

    crop: int | None = None
    padding: int = 0
    fill: str = "zeros"
    flip: float = 0.5

    def __post_init__(self) -> None:
        if self.crop is not None:
            _check_size(self.crop)
        if not isinstance(self.padding, int) or self.padding < 0:
            raise CovNormError(
                f"padding={self.padding!r}: give a whole number of pixels, 0 or more"
            )
        if self.fill not in PADDINGS:
            raise CovNormError(f"fill={self.fill!r}: {choices(self.fill, PADDINGS)}")
        if not 0 <= self.flip <= 1:
            raise CovNormError(f"flip={self.flip!r}: give a probability between 0 and 1")

    def __call__(self, images: Tensor) -> Tensor:
        """(n, c, h, w) → (n, c, crop, crop); any dtype and device, channels_last is kept."""
        if images.ndim != 4:
            raise CovNormError(f"images are {tuple(images.shape)}, a batch is (n, c, h, w)")
        n, c, h, w = images.shape
        rows, cols = self._places(n, h, "high"), self._places(n, w, "wide")
        cols = torch.where(torch.rand(n, 1) < self.flip, cols.flip(1), cols)
        rows, in_h = self._inside(rows, h)
        cols, in_w = self._inside(cols, w)
        # One gather does crop, flip and padding: faster than a loop of slices, and in any dtype.
        index = (rows[:, :, None] * w + cols[:, None, :]).flatten(1).to(images.device)
        out = images.reshape(n, c, h * w).gather(2, index[:, None].expand(-1, c, -1))
        out = out.unflatten(2, (rows.shape[1], cols.shape[1]))
        if self.padding and self.fill == "zeros":
            outside = ~(in_h[:, None, :, None] & in_w[:, None, None, :])
            out = out.masked_fill(outside.to(images.device), 0)
        last = images.is_contiguous(memory_format=torch.channels_last)
        if last and not images.is_contiguous():
            return out.contiguous(memory_format=torch.channels_last)
        return out

    def _places(self, n: int, side: int, word: str) -> Tensor:
        """Pixels that each sample takes along one side (n, crop): from -padding to side+padding."""
        size = side if self.crop is None else self.crop
        room = side + 2 * self.padding - size
        if room < 0:
            raise CovNormError(
                f"crop={size} does not fit into images {side} pixels {word} with padding "
                f"{self.padding}: take a smaller crop or more padding"
            )
        if self.fill == "reflect" and self.padding >= side:
            raise CovNormError(
                f"padding={self.padding} cannot reflect images {side} pixels {word}: take less"
            )
        return torch.randint(room + 1, (n, 1)) - self.padding + torch.arange(size)

    def _inside(self, index: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Indices brought into the image, and which of them were there before."""
        inside = (index >= 0) & (index < side)
        if self.fill == "reflect":
            index = index.abs()
            return torch.where(index < side, index, 2 * (side - 1) - index), inside
        return index.clamp(0, side - 1), inside


def _check_image(image: Tensor) -> None:
    if image.ndim != 3 or 0 in image.shape:
        raise CovNormError(f"an image is {tuple(image.shape)}, need (c, h, w)")


def _check_size(n: object) -> None:
    if not isinstance(n, int) or n < 1:
        raise CovNormError(f"size {n!r}: give a whole number of pixels, 1 or more")


def _room(image: Tensor, n: int) -> tuple[int, int]:
    """How many pixels are left over by an n × n crop, downwards and to the right."""
    _check_size(n)
    h, w = image.shape[-2:]
    if min(h, w) < n:
        raise CovNormError(f"an image of {h} × {w} has no crop of {n} × {n}: resize it first")
    return h - n, w - n
