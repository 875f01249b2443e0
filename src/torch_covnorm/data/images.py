"""Images as tensors: resize, crop, flip, normalize, augment, and channel statistics.

A single image is (3, h, w), uint8 until it is normalized. Random operations draw from torch's
global CPU generator, so one seed gives the same images on every device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError, check_integer, choices
from ..training.batches import PerChannel, normalise

Statistics = tuple[list[float], list[float]]
FITS = ("squash", "crop", "letterbox")
RESIZE = "bilinear, antialias"  # the filter of `fit_image`, as records name it
COLORS = {"white": "#ffffff", "gray": "#808080", "black": "#000000"}
WHITE = COLORS["white"]


class InputShape(NamedTuple):
    """How an image becomes a square: side in pixels, fit, and background."""

    size: int
    fit: str = "squash"
    background: str | None = WHITE


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


def fit_image(
    image: Tensor, size: int, fit: str = "squash", background: str | None = WHITE
) -> Tensor:
    """Resize to a square: uint8 (3, h, w) → uint8 (3, size, size), bilinear with antialiasing.

    "squash" uses the whole image and changes its aspect ratio, "crop" the square in its middle.
    "letterbox" uses the whole image, keeps its aspect ratio and pads it on both sides with the
    color `background`, white if that is None.
    """
    if fit not in FITS:
        raise CovNormError(f"fit={fit!r}: {choices(fit, FITS)}")
    h, w = image.shape[-2:]
    if fit == "crop":  # before resizing, so that a long strip does not grow
        image = centre_crop(image, min(h, w))
    if fit != "letterbox" or h == w:
        return _interpolate(image[None].contiguous(), (size, size))[0].contiguous()
    # Rounded as in Pillow's ImageOps.pad, so that others get the same pixels from it.
    inner = (size, max(1, round(w / h * size))) if h > w else (max(1, round(h / w * size)), size)
    top, left = (round((size - side) / 2) for side in inner)
    padding = torch.tensor(rgb(background) or rgb(WHITE), dtype=image.dtype, device=image.device)
    square = padding[:, None, None].repeat(1, size, size)
    resized = _interpolate(image[None].contiguous(), inner)[0]
    square[:, top : top + inner[0], left : left + inner[1]] = resized
    return square


def check_background(background: Any) -> str | None:
    """Return a color as "#rrggbb". None, or "none", means no background: alpha is dropped."""
    if background is None or background == "none":
        return None
    color = COLORS.get(background, background) if isinstance(background, str) else ""
    if not re.fullmatch("#[0-9a-fA-F]{6}", color):
        known = ", ".join(COLORS)
        raise CovNormError(f"background={background!r}: must be {known}, #rrggbb or none")
    return color.lower()


def rgb(background: str | None) -> tuple[int, ...] | None:
    """Return red, green and blue of a background, each 0 to 255; None if there is none."""
    color = check_background(background)
    return None if color is None else tuple(bytes.fromhex(color[1:]))


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


def _interpolate(x: Tensor, size: tuple[int, int]) -> Tensor:
    if x.shape[-2:] == size:
        return x
    return F.interpolate(x, size=size, mode="bilinear", antialias=True)


def _crop(image: Tensor, n: int, choose: Callable[[int], int]) -> Tensor:
    """Crop n × n pixels. `choose` gets the pixels to leave out per side, and returns the first."""
    check_integer("size", n)
    h, w = image.shape[-2:]
    if min(h, w) < n:
        raise CovNormError(f"an image of {h} × {w} is too small for a crop of {n}. Resize it.")
    top, left = choose(h - n), choose(w - n)
    return image[..., top : top + n, left : left + n]
