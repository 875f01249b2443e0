"""Read image files of any common format as RGB tensors. Anything else is an error that names it."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import CovNormError
from .images import WHITE, fit_image, rgb

if TYPE_CHECKING:
    from PIL.Image import Image

ImageFile = str | os.PathLike[str] | bytes
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF")
ENDINGS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .tif .tiff .pgm .ppm .pbm .pnm .gif".split()  # noqa: SIM905
)
MIN_SIDE = 8  # pixels of an image that a network reads
MAX_PIXELS = 64_000_000
MAX_BYTES = 8 * MAX_PIXELS  # four channels of 16 bits
_TOO_LARGE = f"the limit is {MAX_PIXELS // 1_000_000} million pixels. Scale the image down."
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class ImageError(CovNormError):
    """An image cannot be read. `reason` is the message without the name of the image."""

    def __init__(self, reason: object, name: str | None = None) -> None:
        # The name is optional, because DataLoader workers pass errors on as ImageError(message).
        super().__init__(reason if name is None else f"{name}: {reason}")
        self.reason = str(reason)


def has_image_ending(name: str) -> bool:
    """Return whether a file name ends like that of an image."""
    return Path(name).suffix.lower() in ENDINGS


def read_image(
    file: ImageFile,
    *,
    background: str | None = WHITE,
    name: str | None = None,
    smallest: int = 1,
) -> Tensor:
    """Read an image as RGB, uint8 (3, h, w): its first frame, rotated as its EXIF data says.

    JPEG, PNG, WebP, BMP, TIFF, PGM, PPM and GIF; the content decides, not the file name. Gray is
    repeated for all channels, palettes are resolved, and of 16 bits the upper 8 are used. An image
    with alpha a is composited: ``a * color + (1 - a) * background``, rounded to 8 bits.

    Args:
        file: a path to a regular file, or the bytes of one.
        background: white, gray, black or "#rrggbb". None drops alpha: a transparent pixel keeps
            its stored color.
        name: what error messages call the image; the path by default.
        smallest: fewer pixels than this on a side are an error.
    """
    from PIL import ImageOps  # importing the package must not load it

    color = rgb(background)
    with _opened(file, name, smallest) as image:
        image.load()
        with contextlib.suppress(Exception):  # the pixels are good even if the metadata are not
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            pixels = np.stack([_upper_bits(image)] * 3, axis=-1)
            if color and "transparency" in image.info:  # the one gray level that is transparent
                pixels[np.asarray(image) == image.info["transparency"]] = color
        elif image.mode in ("I", "F"):
            mode = f"pixels of mode {image.mode!r}"
            raise CovNormError(f"{mode} have no fixed range. Save them with 8 bits per channel.")
        else:
            pixels = np.array(_without_alpha(image, color))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def load_image(
    file: ImageFile,
    size: int,
    fit: str = "squash",
    background: str | None = WHITE,
    *,
    name: str | None = None,
) -> Tensor:
    """Read an image and resize it as `decode` does: uint8 (3, size, size)."""
    image = read_image(file, background=background, name=name, smallest=MIN_SIDE)
    return fit_image(image, size, fit, background)


def image_size(file: ImageFile) -> tuple[int, int]:
    """Return height and width of an image as stored, from its header only."""
    with _opened(file) as image:
        return image.height, image.width


class _SilentPillow:
    """Suppress Pillow's warnings while any thread reads an image.

    They are about large images, which are an error here, or about metadata. Python's warning
    filters are shared by all threads: the first reader adds one and the last removes it.
    """

    def __init__(self) -> None:
        self._lock, self._readers = threading.Lock(), 0
        self._filters = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._readers == 0:
                self._filters.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._readers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._filters.close()


_SILENT = _SilentPillow()


@contextlib.contextmanager
def _opened(file: ImageFile, name: str | None = None, smallest: int = 1) -> Iterator[Image]:
    """Open an image, read its header and check its size.

    Any failure, here or in the body of the with statement, becomes an ImageError.
    """
    from PIL import Image, UnidentifiedImageError

    if name is None:
        name = "image" if isinstance(file, bytes) else os.fsdecode(file)
    try:
        data = file if isinstance(file, bytes) else _contents(os.fsdecode(file))
        if not data:
            raise CovNormError("not an image: the file is empty. Restore it from a copy.")
        with _SILENT, Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = f"{image.height} × {image.width} pixels"
            if image.height * image.width > MAX_PIXELS:
                raise CovNormError(f"{pixels}: {_TOO_LARGE}")
            if min(image.size) < smallest:
                raise CovNormError(f"{pixels}: at least {smallest} per side are needed. Omit it.")
            yield image
    except CovNormError as error:
        raise ImageError(error, name) from None
    except Image.DecompressionBombError:
        raise ImageError(_TOO_LARGE, name) from None
    except UnidentifiedImageError:
        reason = f"not an image: the content is not {', '.join(FORMATS)}. Convert or remove it."
        raise ImageError(reason, name) from None
    except Exception as error:  # Pillow's decoders raise many types for damaged bytes
        reason = f"not an image that Pillow can read ({error}). Restore it from a copy."
        raise ImageError(reason, name) from error


def _contents(path: str) -> bytes:
    """Return the bytes of a regular file. Never wait for a pipe or a device."""
    try:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode):
            actual = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise CovNormError(f"not an image but a {actual}. Pass a file.")
        # Do not wait either if a pipe has replaced the file since the check.
        with open(path, "rb", opener=lambda p, f: os.open(p, f | _NONBLOCK)) as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CovNormError("no such image. Correct the path, or restore the file.") from None
    except OSError as error:
        raise CovNormError(f"cannot be read ({error.strerror or error})") from error
    if len(data) > MAX_BYTES:
        raise CovNormError(f"more than {MAX_BYTES >> 20} MB: {_TOO_LARGE}")
    return data


def _without_alpha(image: Image, color: tuple[int, ...] | None) -> Image:
    """Return an image as RGB, composited on a color; if that is None, its stored colors."""
    from PIL import Image as images

    if "transparency" not in image.info and not image.mode.endswith(("A", "a")):
        return image.convert("RGB")
    if color is None:  # through RGBA, because Pillow warns about a palette with alpha
        return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    image = image.convert("RGBA")
    canvas = images.new("RGB", image.size, color)
    canvas.paste(image, mask=image)  # rounded exactly
    return canvas


def _upper_bits(image: Image) -> np.ndarray:
    """Return the upper 8 bits of 16-bit gray (h, w) as uint8. Pillow would clip at 255."""
    tags = getattr(image, "tag_v2", {})  # only in TIFF: 258 bits per sample, 262 photometric
    gray = np.asarray(image).astype(np.uint16) >> (4 if tags.get(258) == (12,) else 8)
    return (255 - gray if tags.get(262) == 0 else gray).astype(np.uint8)  # 0: white is zero
