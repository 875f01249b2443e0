"""Decode every image of a source at one size, in parallel, and cache the result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import CovNormError, check_integer, choices
from ..records import blame
from ..threads import usable_cpus
from .cache import Row, cache_in_use, collect_rows, load_rows, map_in_order, pixel_hash
from .image_files import MIN_SIDE, ImageError, image_size, load_image
from .images import (
    FITS,
    RESIZE,
    WHITE,
    InputShape,
    check_background,
    fit_image,
)
from .source import Source
from .splits import SPLITS, Items, first_few

VERSION = 2  # of the files in a cache
SAMPLE = 200  # images used to choose the size
Pairs = tuple[tuple[str, str], ...]


class Images(NamedTuple):
    """x: uint8 (n, 3, size, size), possibly a memory map; y: int64 (n,); the n file names."""

    x: Tensor
    y: Tensor
    files: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Decoded:
    """The decoded images of a source.

    Attributes:
        splits: "train", and "val" and "test" if there are any.
        classes: class names in the order of the labels.
        size: side of the images in pixels.
        fit: how they were resized: "squash", "crop" or "letterbox".
        unreadable: (file, reason) of images that were left out.
        duplicates: pairs of files in different splits with equal pixels.
        digest: SHA-256 of pixels, labels and classes.
        notes: messages for the user.
        background: the color "#rrggbb" below transparent pixels; None if alpha was dropped.
    """

    splits: dict[str, Images]
    classes: tuple[str, ...]
    size: int
    fit: str
    unreadable: Pairs
    duplicates: Pairs
    digest: str
    notes: tuple[str, ...]
    background: str | None = WHITE

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How the pixels were made, for the record of a domain: size, fit, background, resize."""
        made = {"size": self.size, "fit": self.fit, "background": self.background}
        return {**made, "resize": RESIZE}

    def balance(self) -> dict[str, dict[str, int]]:
        """Return the number of images as ``{split: {class: n}}``."""
        n = len(self.classes)
        counts = {split: images.y.bincount(minlength=n) for split, images in self.splits.items()}
        return {s: dict(zip(self.classes, c.tolist(), strict=True)) for s, c in counts.items()}


def merged(old: Decoded, new: Decoded) -> Decoded:
    """Return the images of both, split by split. New classes come after the old ones.

    Both must have been decoded in the same way.
    """
    if old.preprocessing != new.preprocessing:
        raise CovNormError(f"images decoded as {old.preprocessing} and {new.preprocessing}")
    both = relabelled(new, (*old.classes, *(c for c in new.classes if c not in old.classes)))
    splits = dict(both.splits)
    for split, part in old.splits.items():
        more = splits.get(split, Images(part.x[:0], part.y[:0], ()))
        x, y = torch.cat([part.x, more.x]), torch.cat([part.y, more.y])
        splits[split] = Images(x, y, part.files + more.files)
    return replace(
        both,
        splits={split: splits[split] for split in SPLITS if split in splits},
        unreadable=old.unreadable + new.unreadable,
        duplicates=old.duplicates + new.duplicates,
        digest=hashlib.sha256(f"{old.digest} {new.digest}".encode()).hexdigest(),
        notes=old.notes + new.notes,
    )


def relabelled(data: Decoded, classes: tuple[str, ...]) -> Decoded:
    """Return the same images with labels that count in `classes`, which has all of theirs."""
    place = torch.tensor([classes.index(name) for name in data.classes])
    splits = {split: part._replace(y=place[part.y]) for split, part in data.splits.items()}
    return replace(data, splits=splits, classes=classes)


def decode(
    source: Source,
    size: int | None = None,
    fit: str = "squash",
    background: str | None = WHITE,
    *,
    size_limit: int = 224,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    limit: float = 0.05,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """Decode all splits of a source as uint8 (n, 3, size, size), with labels and names.

    Args:
        source: from `read_source`.
        size: side in pixels. By default the median shorter side of a sample of the training images,
            rounded up to a multiple of 32, between 64 and `size_limit`.
        fit: "squash", "crop" or "letterbox", as in `fit_image`.
        background: a color below transparent pixels, as in `read_image`, and around a letterbox.
        size_limit: the largest side to choose by default: the size the backbone was trained with.
        cache: a folder for the pixels, one .npy per split, which the next call maps into memory. It
            depends on the place, sizes and times of the image files. By default memory is used.
        workers: threads, by default one per CPU that this process may use.
        limit: share of the images that may be unreadable. These are left out. More are an error,
            and so is a split, or a class in train, without any readable image.
        strict: make the first unreadable image an error.
        progress: called as progress(done, total).
    """
    _check(fit, size, size_limit, workers, limit)
    size = _automatic_size(source, size_limit) if size is None else size
    inputs = InputShape(size, fit, check_background(background))
    folder = None if cache is None else Path(cache)
    total = sum(len(items) for items in source.splits.values())
    done = 0

    def advance(n: int = 1) -> None:
        nonlocal done
        done += n
        if progress:
            progress(done, total)

    def results(job: _SplitJob) -> Iterator[Row | ImageError]:
        for result in map_in_order(pool, job.read, len(job.items)):
            if strict and isinstance(result, ImageError):
                raise CovNormError(f"{source.path}: {result}")
            yield result
            advance()

    splits: dict[str, Images] = {}
    contents: dict[str, Iterable[tuple[bytes, str]]] = {}
    unreadable: list[tuple[str, str]] = []
    digest = hashlib.sha256(json.dumps(source.classes).encode())
    with ThreadPoolExecutor(workers or usable_cpus()) as pool, cache_in_use(folder) as writable:
        for split, items in source.splits.items():
            job = _SplitJob(source, items, inputs)
            file = folder and folder / f"{job.key()}.npy"
            rows = load_rows(file, job.shape, pool, job.read) if file else None
            if rows and not (strict and rows.unreadable):
                advance(len(items))
            else:
                rows = collect_rows(results(job), job.shape, file if writable else None)
            x, hashes, failed = rows
            good = [i for i in range(len(items)) if i not in failed]
            y = torch.tensor([items.labels[i] for i in good], dtype=torch.int64)
            splits[split] = Images(_tensor(x), y, tuple(items.names[i] for i in good))
            contents[split] = zip(hashes, splits[split].files, strict=True)
            unreadable += [(items.names[i], reason) for i, reason in failed.items()]
            digest.update(f"{split} {x.shape}".encode() + b"".join(hashes) + y.numpy().tobytes())
    notes = () if writable or not folder else (f"{folder} is read-only: nothing is cached there",)
    bad, same = tuple(unreadable), duplicates(contents)
    found = (bad, same, digest.hexdigest(), notes)
    data = Decoded(splits, source.classes, size, fit, *found, inputs.background)
    with blame(source.path):
        _check_unreadable(data, limit)
    return data


def cached_names(source: Source, inputs: InputShape) -> set[str]:
    """Return the names of the files that `decode` caches a source in."""
    return {f"{_SplitJob(source, i, inputs).key()}.npy" for i in source.splits.values()}


def duplicates(splits: Mapping[str, Iterable[tuple[Hashable, str]]]) -> Pairs:
    """Return pairs (file, later file) of equal content in two splits, given (content, file).

    A file is paired with the first equal file of every earlier split.
    """
    pairs: list[tuple[str, str]] = []
    earlier: list[dict[Hashable, str]] = []
    for files in splits.values():
        current: dict[Hashable, str] = {}
        for content, file in files:
            pairs += [(other[content], file) for other in earlier if content in other]
            current.setdefault(content, file)
        earlier.append(current)
    return tuple(pairs)


def _check(fit: str, size: object, size_limit: object, workers: object, limit: float) -> None:
    if fit not in FITS:
        raise CovNormError(f"fit={fit!r}: {choices(fit, FITS)}")
    for name, value in (("size", size), ("size_limit", size_limit), ("workers", workers)):
        if value is not None:
            check_integer(name, value, 1 if name == "workers" else MIN_SIDE)
    if not 0 <= limit <= 1:
        raise CovNormError(f"limit={limit!r}: must be a share from 0 to 1")


def _check_unreadable(data: Decoded, limit: float) -> None:
    bad = len(data.unreadable)
    total = bad + sum(len(images.y) for images in data.splits.values())
    examples = first_few([f"{file}: {reason}" for file, reason in data.unreadable], "; ", str)
    if bad > limit * total:
        raise CovNormError(
            f"{bad} of {total} images cannot be read, more than {limit:.0%} (limit). Restore or "
            f"remove them: {examples}"
        )
    left = {f"split {split!r}": len(images.y) for split, images in data.splits.items()}
    left |= {f"class {name!r} in train": n for name, n in data.balance()["train"].items()}
    for group, n in left.items():
        if n == 0:
            raise CovNormError(f"{group} has no readable image. Add one. Unreadable: {examples}")


def _automatic_size(source: Source, size_limit: int) -> int:
    train = source.splits["train"]
    sides = [] if train.pixels is None else [min(train.pixels.shape[1:3])]
    for i in range(0, 0 if sides else len(train), -(-len(train) // SAMPLE)):
        with contextlib.suppress(ImageError):  # reported when it is decoded
            sides.append(min(image_size(source.folder / train.names[i])))
    side = 32 * math.ceil(statistics.median(sides or [size_limit]) / 32)
    return min(max(side, 64), size_limit)


def _tensor(x: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # a map larger than all memory is read-only, see `open_rows`
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(x)


class _SplitJob(NamedTuple):
    """The decoding of one split."""

    source: Source
    items: Items
    inputs: InputShape

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.items), 3, self.inputs.size, self.inputs.size

    def key(self) -> str:
        """Hash what the pixels depend on: place, names, sizes and times of the files, in order."""
        from PIL import __version__ as decoder

        # The place is included, because copies of an archive may agree in everything else.
        path, rows = self.source.path.resolve(), self.items.pixels is not None
        start = [VERSION, decoder, *self.inputs, str(path), _stamp(path) if rows else None]
        key = hashlib.sha256(json.dumps(start).encode())
        for name in self.items.names:
            stamp = None if rows else _stamp(self.source.folder / name)
            key.update(json.dumps([name, stamp]).encode())
        return key.hexdigest()[:32]

    def read(self, i: int) -> Row | ImageError:
        """Return one image (3, size, size) and its hash, or why it cannot be read."""
        name, pixels = self.items.names[i], self.items.pixels
        try:
            if pixels is None:
                image = load_image(self.source.folder / name, *self.inputs, name=name)
            else:
                row = torch.from_numpy(np.ascontiguousarray(pixels[i])).permute(2, 0, 1)
                image = fit_image(row.expand(3, -1, -1), *self.inputs)
        except ImageError as error:
            return error
        return image.numpy(), pixel_hash(image.numpy())


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns
