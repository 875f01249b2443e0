"""Image files as tensors, whatever they hold; what is no image is refused by its name."""

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

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF")
MOST_PIXELS = 64_000_000
MOST_BYTES = 8 * MOST_PIXELS  # four channels of 16 bits
_TOO_MANY = f"at most {MOST_PIXELS // 1_000_000} million pixels are read: scale it down"
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def read_image(
    file: str | os.PathLike[str] | bytes, *, name: str | None = None, smallest: int = 1
) -> Tensor:
    """An image as RGB, uint8 (3, h, w): its first frame, turned upright as its EXIF data says.

    JPEG, PNG, WebP, BMP, TIFF, PGM and PPM, GIF; the content decides, not the file's name. Grey is
    repeated, palettes are looked up, 16 bits give their upper 8. Alpha is dropped: a transparent
    pixel keeps the colour that is stored under it.

    Args:
        file: a path to a regular file, or the bytes of one.
        name: what errors call the image; None: its path.
        smallest: fewer pixels than this on a side are an error.
    """
    from PIL import ImageOps  # importing the package must not load it

    with _opened(file, name, smallest) as image:
        image.load()
        with contextlib.suppress(Exception):  # odd metadata spoils no pixels
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            pixels = np.stack([_upper_bits(image)] * 3, axis=-1)
        elif image.mode in ("I", "F"):
            raise CovNormError(
                f"pixels of mode {image.mode!r} have no fixed range: save the image with 8 bits "
                "a channel"
            )
        else:  # by way of RGBA, because Pillow warns about a palette with alpha
            alpha = "transparency" in image.info
            pixels = np.array((image.convert("RGBA") if alpha else image).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def image_size(file: str | os.PathLike[str] | bytes, *, name: str | None = None) -> tuple[int, int]:
    """Height and width of an image as it is stored, from its header alone."""
    with _opened(file, name) as image:
        return image.height, image.width


class _Quiet:
    """Pillow's warnings are silent while anyone reads an image.

    What it warns about is an error here (size) or harmless (metadata). Python's filters belong to
    all threads: the first reader sets one and the last takes it away.
    """

    def __init__(self) -> None:
        self._lock, self._readers = threading.Lock(), 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            self._readers += 1
            if self._readers == 1:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._filters.__exit__(None, None, None)


_QUIET = _Quiet()


@contextlib.contextmanager
def _opened(
    file: str | os.PathLike[str] | bytes, name: str | None, smallest: int = 1
) -> Iterator[Image]:
    """The image behind a path or bytes, its header read and its size checked.

    Whatever goes wrong, here or in the block, is a CovNormError that names it.
    """
    from PIL import Image, UnidentifiedImageError

    if name is None:
        name = "image" if isinstance(file, bytes) else os.fsdecode(file)
    try:
        data = file if isinstance(file, bytes) else _contents(os.fsdecode(file))
        if not data:
            raise CovNormError("not an image: it is empty: restore it from a copy")
        with _QUIET, Image.open(io.BytesIO(data), formats=FORMATS) as image:
            h, w = image.height, image.width
            if h * w > MOST_PIXELS:
                raise CovNormError(f"{h} × {w} pixels: {_TOO_MANY}")
            if min(h, w) < smallest:
                raise CovNormError(
                    f"{h} × {w} pixels: need at least {smallest} on a side: leave it out"
                )
            yield image
    except CovNormError as error:
        raise CovNormError(f"{name}: {error}") from None
    except Image.DecompressionBombError:
        raise CovNormError(f"{name}: {_TOO_MANY}") from None
    except UnidentifiedImageError:
        raise CovNormError(
            f"{name}: not an image: its content is no JPEG, PNG, WebP, BMP, TIFF, PGM or GIF: "
            "convert it, or leave it out"
        ) from None
    except Exception as error:  # damaged bytes make Pillow's decoders raise nearly anything
        raise CovNormError(
            f"{name}: not an image that Pillow can read ({error}): restore it from a copy"
        ) from error


def _contents(path: str) -> bytes:
    """The bytes of a regular file. A pipe or a device is never waited for."""
    try:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode):
            what = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise CovNormError(f"not an image but a {what}: give a file")
        # Nothing waits either if a pipe takes the file's place just now.
        with open(path, "rb", opener=lambda p, f: os.open(p, f | _NONBLOCK)) as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise CovNormError("no such image: correct the path, or restore the file") from None
    except OSError as error:
        raise CovNormError(f"cannot be read ({error.strerror or error})") from error
    if len(data) > MOST_BYTES:
        raise CovNormError(f"more than {MOST_BYTES >> 20} MB: {_TOO_MANY}")
    return data


def _upper_bits(image: Image) -> np.ndarray:
    """Grey of 16 bits (h, w) → its upper 8 as uint8; Pillow itself would clip it at 255."""
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    grey = np.asarray(image).astype(np.uint16) >> (4 if tags.get(258) == (12,) else 8)
    return (255 - grey if tags.get(262) == 0 else grey).astype(np.uint8)  # 0: white is zero
