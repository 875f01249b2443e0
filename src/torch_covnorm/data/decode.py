"""Every image of a source at one size, as tensors: decoded in parallel, and kept for next time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CovNormError, choices
from ..records import blame
from .cache import Memory, Rows, Stored, hash_of, in_order, in_use, recalled
from .convention import SMALLEST
from .images import centre_crop
from .reading import image_size, read_image
from .source import Source
from .splits import Decoded, Images, Items, check_losses, duplicates

FITS = ("squash", "crop")
VERSION = 1  # of the files in a cache
SAMPLE = 200  # images whose size is looked at
File = str | os.PathLike[str]


def fit_image(image: Tensor, size: int, fit: str = "squash") -> Tensor:
    """uint8 (3, h, w) → uint8 (3, size, size), bilinear with antialiasing.

    "squash" takes the whole image whatever its shape, "crop" the square in its middle.
    """
    if fit not in FITS:
        raise CovNormError(f"fit={fit!r}: {choices(fit, FITS)}")
    if fit == "crop":  # before resizing: of a long strip, only what is seen
        image = centre_crop(image, min(image.shape[-2:]))
    if image.shape[-2:] != (size, size):
        image = functional.interpolate(
            image[None].contiguous(), size=(size, size), mode="bilinear", antialias=True
        )[0]
    return image.contiguous()


def load_image(
    file: File | bytes, size: int, fit: str = "squash", *, name: str | None = None
) -> Tensor:
    """An image, or the bytes of one, as `decode` gives it: uint8 (3, size, size)."""
    return fit_image(read_image(file, name=name, smallest=SMALLEST), size, fit)


def decode(
    source: Source,
    size: int | None = None,
    fit: str = "squash",
    *,
    size_limit: int = 224,
    cache: File | None = None,
    workers: int | None = None,
    limit: float = 0.05,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """All splits of a source as uint8 (n, 3, size, size), with labels and names.

    Args:
        source: from `read_source`.
        size: side in pixels. None: the median shorter side of a sample of the training images,
            rounded up to a multiple of 32, from 64 to `size_limit`.
        fit: "squash" or "crop", as in `fit_image`.
        size_limit: largest side that is chosen by itself; what the backbone was trained with.
        cache: a folder for the pixels, one .npy a split, by place, sizes and times of the files.
            They are mapped into memory and found again next time. None: all in memory.
        workers: threads; None: one a core.
        limit: share of the images that may be unreadable and are then left out. More are an
            error, and so is a split, or a class in train, that loses all.
        strict: the first unreadable image is an error.
        progress: called as progress(done, total) when images are decoded.
    """
    _check(fit, size, size_limit, workers, limit)
    size = _automatic(source, size_limit) if size is None else size
    folder = None if cache is None else Path(cache)
    total = sum(len(items) for items in source.splits.values())
    done = 0

    def step(n: int = 1) -> None:
        nonlocal done
        done += n
        if progress:
            progress(done, total)

    found: dict[str, Rows] = {}
    with ThreadPoolExecutor(workers or _cores()) as pool, in_use(folder) as writable:
        for split, items in source.splits.items():
            job = _Job(source, items, size, fit)
            file = folder and folder / f"{job.key()}.npy"
            rows = recalled(file, job.shape, pool, job.lost) if file else None
            if rows and not (strict and rows.bad):
                step(len(items))
            else:
                into = Stored(file, job.shape) if file and writable else Memory(job.shape)
                rows = _decoded(job, pool, into, strict, step)
            found[split] = rows
    splits = {}
    unreadable: list[tuple[str, str]] = []
    digest = hashlib.sha256(json.dumps(source.classes).encode())
    for split, (x, hashes, bad) in found.items():
        names, labels = source.splits[split].names, source.splits[split].labels
        there = [i for i in range(len(names)) if i not in bad]
        y = torch.tensor([labels[i] for i in there], dtype=torch.int64)
        splits[split] = Images(_tensor(x), y, tuple(names[i] for i in there))
        unreadable += [(names[i], reason) for i, reason in bad.items()]
        digest.update(f"{split} {x.shape}".encode() + b"".join(hashes) + y.numpy().tobytes())
    with blame(source.path):
        check_losses(splits, source.classes, unreadable, limit)
    return Decoded(
        splits,
        source.classes,
        size,
        fit,
        tuple(unreadable),
        duplicates({s: zip(found[s].hashes, splits[s].files, strict=True) for s in splits}),
        digest.hexdigest(),
        () if writable or not folder else (f"{folder} is read-only: nothing is kept there",),
    )


def _check(fit: str, size: object, size_limit: object, workers: object, limit: float) -> None:
    if fit not in FITS:
        raise CovNormError(f"fit={fit!r}: {choices(fit, FITS)}")
    least = {"size": SMALLEST, "size_limit": SMALLEST, "workers": 1}
    for (what, n), value in zip(least.items(), (size, size_limit, workers), strict=True):
        if value is not None and not (isinstance(value, int) and value >= n):
            raise CovNormError(f"{what}={value!r}: give a whole number, {n} or more")
    if not 0 <= limit <= 1:
        raise CovNormError(f"limit={limit!r}: give a share from 0 to 1")


def _automatic(source: Source, size_limit: int) -> int:
    """The side that suits the training images."""
    train = source.splits["train"]
    sides = [] if train.pixels is None else [min(train.pixels.shape[1:3])]
    for i in range(0, 0 if sides else len(train), -(-len(train) // SAMPLE)):
        with contextlib.suppress(CovNormError):  # told when it is decoded
            sides.append(min(image_size(source.folder / train.names[i])))
    side = 32 * math.ceil(statistics.median(sides or [size_limit]) / 32)
    return min(max(side, 64), size_limit)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tensor(x: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # see `mapped`
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(x)


# ── one split ───────────────────────────────────────────────────────────────────────────────────


class _Job(NamedTuple):
    source: Source
    items: Items
    size: int
    fit: str

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.items), 3, self.size, self.size

    def key(self) -> str:
        """What the pixels come from: place, names, sizes and times of the files, in their order."""
        from PIL import __version__ as decoder

        # The place, because unpacked archives may agree in all the rest.
        path, rows = self.source.path.resolve(), self.items.pixels is not None
        start = [VERSION, decoder, self.size, self.fit, str(path), _stamp(path) if rows else None]
        key = hashlib.sha256(json.dumps(start).encode())
        for name in self.items.names:
            stamp = None if rows else _stamp(self.source.folder / name)
            key.update(json.dumps([name, stamp]).encode())
        return key.hexdigest()[:32]

    def read(self, i: int) -> tuple[np.ndarray, bytes] | str:
        """One image (3, size, size) and its hash, or the reason why it cannot be read."""
        name, pixels = self.items.names[i], self.items.pixels
        try:
            if pixels is None:
                image = load_image(self.source.folder / name, self.size, self.fit, name=name)
            else:
                row = torch.from_numpy(np.ascontiguousarray(pixels[i])).permute(2, 0, 1)
                image = fit_image(row.expand(3, -1, -1), self.size, self.fit)
        except CovNormError as error:
            return str(error).removeprefix(f"{name}: ")
        return image.numpy(), hash_of(image.numpy())

    def lost(self, i: int) -> bool:
        """Whether an image cannot be read."""
        return isinstance(self.read(i), str)


def _decoded(
    job: _Job,
    pool: ThreadPoolExecutor,
    into: Memory | Stored,
    strict: bool,
    step: Callable[[], None],
) -> Rows:
    hashes, bad = [], {}
    with into:
        for i, answer in enumerate(in_order(pool, job.read, len(job.items))):
            if not isinstance(answer, str):
                into.add(answer[0])
                hashes.append(answer[1])
            elif strict:
                raise CovNormError(f"{job.source.path}: {job.items.names[i]}: {answer}")
            else:
                bad[i] = answer
            step()
        return Rows(into.finish(hashes, bad), hashes, bad)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns
