"""Images as tensors: resize, crop, flip, normalize, augment, and channel statistics.

A single image is (3, h, w), uint8 until it is normalized. Random operations draw from torch's
global CPU generator, so one seed gives the same images on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError, choices

PerChannel = float | Sequence[float]
Statistics = tuple[list[float], list[float]]
FITS = ("squash", "crop")
FILLS = ("zeros", "reflect")


def resize(image: Tensor, n: int) -> Tensor:
    """Resize the shorter side to n pixels: (c, h, w) → (c, h', w'), same dtype.

    Bilinear with antialiasing; the longer side is rounded down. For uint8 on the CPU the result is
    Pillow's, except that about one pixel in a hundred differs by one level.
    """
    check_integer("size", n)
    if image.ndim != 3 or 0 in image.shape:
        raise CovNormError(f"an image is {tuple(image.shape)}: must be (c, h, w)")
    h, w = image.shape[-2:]
    if min(h, w) == n:
        return image
    # Only on the CPU does torch resize bytes with Pillow's arithmetic, which rounds twice.
    native = image.dtype == torch.uint8 and image.device.type == "cpu"
    x = image if native or image.is_floating_point() else image.float()
    out = _interpolate(x[None], (n, n * w // h) if h <= w else (n * h // w, n))[0]
    return out if out.dtype == image.dtype else out.round().to(image.dtype)


def centre_crop(image: Tensor, n: int) -> Tensor:
    """Crop the middle n × n pixels: (…, h, w) → (…, n, n). Half offsets round to even."""
    return _crop(image, n, lambda room: round(room / 2))


def random_crop(image: Tensor, n: int) -> Tensor:
    """Crop n × n pixels at a uniformly random position: (…, h, w) → (…, n, n)."""
    return _crop(image, n, lambda room: int(torch.randint(room + 1, ())))


def random_flip(image: Tensor, p: float = 0.5) -> Tensor:
    """Flip left and right with probability p: (…, h, w) → (…, h, w)."""
    return image.flip(-1) if float(torch.rand(())) < p else image


def fit_image(image: Tensor, size: int, fit: str = "squash") -> Tensor:
    """Resize to a square: uint8 (3, h, w) → uint8 (3, size, size), bilinear with antialiasing.

    "squash" uses the whole image and changes its aspect ratio, "crop" the square in its middle.
    """
    if fit not in FITS:
        raise CovNormError(f"fit={fit!r}: {choices(fit, FITS)}")
    if fit == "crop":  # before resizing, so that a long strip does not grow
        image = centre_crop(image, min(image.shape[-2:]))
    return _interpolate(image[None].contiguous(), (size, size))[0].contiguous()


def normalise(images: Tensor, mean: PerChannel, std: PerChannel) -> Tensor:
    """Return ``(x / 255 - mean) / std`` per channel as float32: (…, 3, h, w) → (…, 3, h, w)."""
    shift, scale = (
        torch.as_tensor(v, dtype=torch.float32, device=images.device).reshape(-1, 1, 1)
        for v in (mean, std)
    )
    return (images.float() / 255 - shift) / scale


def prepare(
    images: Tensor, size: int, mean: PerChannel, std: PerChannel, *, channels_last: bool = False
) -> Tensor:
    """Resize and normalize a batch: uint8 (n, 3, h, w) → float32 (n, 3, size, size).

    Bilinear with antialiasing, without rounding in between. `mean` and `std` are on a scale of 0
    to 1, one number for all channels or one per channel.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        got = f"{images.dtype} {tuple(images.shape)}"
        raise CovNormError(f"images are {got}: must be uint8 (n, 3, h, w), as in load_sample")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = _interpolate(images.float(), (size, size))
    return normalise(x, mean, std).contiguous(memory_format=layout)


def channel_statistics(images: Iterable[Tensor]) -> Statistics:
    """Return mean and standard deviation per channel over all pixels of uint8 images (3, h, w).

    They are on a scale of 0 to 1, as `normalise` needs them. The sums are integers, so the result
    does not depend on the order of the images.
    """
    n, sums, squares = 0, torch.zeros(3).long(), torch.zeros(3).long()
    for image in images:
        if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3 or 0 in image.shape:
            got = f"{image.dtype} {tuple(image.shape)}"
            raise CovNormError(f"an image is {got}: statistics need uint8 (3, h, w)")
        x = image.flatten(1).long().cpu()
        n += x.shape[1]
        sums += x.sum(1)
        squares += (x * x).sum(1)
    if n == 0:
        raise CovNormError("no images to compute mean and std from. Pass at least one.")
    pairs = list(zip(sums.tolist(), squares.tolist(), strict=True))
    variance = [(n * q - s * s) / (255 * n) ** 2 for s, q in pairs]
    return [s / (255 * n) for s, _ in pairs], [v**0.5 for v in variance]


def check_statistics(entry: Any, where: str) -> Statistics:
    """Return mean and std of ``{"mean": [r, g, b], "std": [r, g, b]}``; errors name `where`."""
    try:
        values = torch.tensor([list(entry["mean"]), list(entry["std"])], dtype=torch.float64)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise CovNormError(f"{where}: must be {{'mean': [r, g, b], 'std': [r, g, b]}}") from error
    if values.shape != (2, 3) or not values.isfinite().all() or (values[1] <= 0).any():
        raise CovNormError(
            f"{where}: mean and std are {values.tolist()}: both must be three finite numbers, "
            "with std above 0. If a channel never varies, set statistics= yourself."
        )
    mean, std = values.tolist()
    return mean, std


@dataclass(frozen=True)
class Rule:
    """How an image becomes the input of the network: shorter side, crop, and augmentation."""

    resize: int = 72
    crop: int = 64
    random_crop: bool = True
    flip: bool = True

    def __call__(self, image: Tensor, train: bool) -> Tensor:
        """Transform uint8 (3, h, w) → (3, crop, crop), randomly if `train`, else at the center."""
        image = resize(image, self.resize)
        crop = random_crop if train and self.random_crop else centre_crop
        image = crop(image, self.crop)
        return random_flip(image) if train and self.flip else image


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


def _interpolate(x: Tensor, size: tuple[int, int]) -> Tensor:
    if x.shape[-2:] == size:
        return x
    return F.interpolate(x, size=size, mode="bilinear", antialias=True)


def check_integer(name: str, value: object, least: int = 1) -> None:
    """Raise an error unless the value is an integer, `least` or more."""
    if not isinstance(value, int) or value < least:
        raise CovNormError(f"{name}={value!r}: must be an integer, {least} or more")


def _crop(image: Tensor, n: int, choose: Callable[[int], int]) -> Tensor:
    """Crop n × n pixels. `choose` gets the pixels to leave out per side, and returns the first."""
    check_integer("size", n)
    h, w = image.shape[-2:]
    if min(h, w) < n:
        raise CovNormError(f"an image of {h} × {w} is too small for a crop of {n}. Resize it.")
    top, left = choose(h - n), choose(w - n)
    return image[..., top : top + n, left : left + n]
