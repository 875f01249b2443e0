"""Every image of a source at one size, as tensors: decoded in parallel, and kept for next time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import statistics
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CovNormError, choices
from ..records import blame, checksum
from .images import centre_crop, image_size, read_image
from .source import SMALLEST, Source
from .splits import Decoded, Images, Items, check_losses, duplicates

FITS = ("squash", "crop")
VERSION = 1  # of the files in a cache
SAMPLE = 200  # images whose size is looked at
AHEAD = 64  # images on their way to the one that comes next
LEFTOVER = re.compile(r"\.[0-9a-f]{32}\.npy\.[0-9a-f]{16}")
File = str | os.PathLike[str]
T = TypeVar("T")


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

    found: dict[str, _Rows] = {}
    with ThreadPoolExecutor(workers or _cores()) as pool, _in_use(folder) as writable:
        for split, items in source.splits.items():
            job = _Job(source, items, size, fit)
            file = folder and folder / f"{job.key()}.npy"
            rows = _recalled(file, job, pool) if file else None
            if rows and not (strict and rows.bad):
                step(len(items))
            else:
                into = _File(file, job.shape) if file and writable else _Memory(job.shape)
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
    with warnings.catch_warnings():  # see `_mapped`
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(x)


# ── one split ───────────────────────────────────────────────────────────────────────────────────


class _Rows(NamedTuple):
    """The readable images of a split (n, 3, size, size), a hash of each, and why others are not."""

    x: np.ndarray
    hashes: list[bytes]
    bad: dict[int, str]


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
        return image.numpy(), _hash(image.numpy())


def _decoded(
    job: _Job,
    pool: ThreadPoolExecutor,
    into: _Memory | _File,
    strict: bool,
    step: Callable[[], None],
) -> _Rows:
    hashes, bad = [], {}
    with into:
        for i, answer in enumerate(_in_order(pool, job.read, len(job.items))):
            if not isinstance(answer, str):
                into.add(answer[0])
                hashes.append(answer[1])
            elif strict:
                raise CovNormError(f"{job.source.path}: {job.items.names[i]}: {answer}")
            else:
                bad[i] = answer
            step()
        return _Rows(into.finish(hashes, bad), hashes, bad)


def _in_order(pool: ThreadPoolExecutor, work: Callable[[int], T], n: int) -> Iterator[T]:
    """work(0), …, work(n - 1), with a bounded number of them ahead of what is taken."""
    waiting: deque[Future[T]] = deque()
    for i in range(n):
        waiting.append(pool.submit(work, i))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _hash(row: np.ndarray) -> bytes:
    return hashlib.sha256(row.data).digest()


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


class _Memory(contextlib.nullcontext[None]):
    """Rows in memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        try:
            self.x, self.n = np.empty(shape, np.uint8), 0
        except MemoryError as error:
            raise CovNormError(f"the images need too much memory ({error}): use a cache") from None

    def add(self, row: np.ndarray) -> None:
        self.x[self.n] = row
        self.n += 1

    def finish(self, _hashes: list[bytes], _bad: dict[int, str]) -> np.ndarray:
        return self.x[: self.n]


# ── the cache: an .npy file a split, with a JSON record behind the rows ─────────────────────────


class _File:
    """Rows in a file that gets its name when it is complete.

    A stream, because a memory map that finds the disk full would end the process. No fsync: a file
    that a power cut damages is noticed and made anew.
    """

    def __init__(self, file: Path, shape: tuple[int, ...]) -> None:
        self.file, self.shape, self.n = file, shape, 0
        self.temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        with blame(file):
            self.stream = self.temporary.open("xb")

    def __enter__(self) -> None:
        self._header()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what cannot be flushed was told by `add`
            self.stream.close()
        self.temporary.unlink(missing_ok=True)

    def add(self, row: np.ndarray) -> None:
        with blame(self.file):
            self.stream.write(row.data)
        self.n += 1

    def finish(self, hashes: list[bytes], bad: dict[int, str]) -> np.ndarray:
        record = _record(hashes, bad)
        with blame(self.file):
            self.stream.write(json.dumps({**record, "checksum": checksum(record)}).encode())
            self.stream.seek(0)
            self._header()
            self.stream.close()
            self.temporary.replace(self.file)
            return _mapped(self.file)

    def _header(self) -> None:
        """As long for every n, because numpy leaves room for it."""
        about = {"descr": "|u1", "fortran_order": False, "shape": (self.n, *self.shape[1:])}
        np.lib.format.write_array_header_1_0(self.stream, about)


def _record(hashes: list[bytes], bad: dict[int, str]) -> dict[str, Any]:
    pixels = hashlib.sha256(b"".join(hashes)).hexdigest()
    return {"pixels": pixels, "unreadable": {str(i): reason for i, reason in bad.items()}}


def _recalled(file: Path, job: _Job, pool: ThreadPoolExecutor) -> _Rows | None:
    """What a file keeps; None where there is none, or it is not as it was written."""
    try:
        x = _mapped(file)
        with file.open("rb") as stream:
            stream.seek(x.offset + x.nbytes)
            record = json.loads(stream.read())
        seal = record.pop("checksum")
        bad = {int(i): reason for i, reason in record["unreadable"].items()}
        rows = np.asarray(x)
        if rows.shape != (len(job.items) - len(bad), *job.shape[1:]) or rows.dtype != np.uint8:
            return None
        hashes = list(_in_order(pool, lambda i: _hash(rows[i]), len(rows)))
        same = record == _record(hashes, bad) and seal == checksum(record)
        same = same and all(isinstance(job.read(i), str) for i in bad)  # or else it was mended
    except Exception:  # whatever is wrong with it, it is made anew
        return None
    return _Rows(rows, hashes, bad) if same else None


def _mapped(file: Path) -> np.memmap:
    """The rows of a file, which nothing can change. Torch warns about what it cannot write to."""
    try:
        return np.lib.format.open_memmap(file, mode="c")  # what is written stays in memory
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return np.lib.format.open_memmap(file, mode="r")  # larger than all memory


@contextlib.contextmanager
def _in_use(folder: Path | None) -> Iterator[bool]:
    """Whether the folder can be written to; others see that it is.

    What killed writers left there goes, unless others write just now.
    """
    if folder is None or not _is_writable(folder):
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError, OSError):  # no locks on Windows and on some disks
            import fcntl

            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for file in folder.iterdir():
                    if LEFTOVER.fullmatch(file.name):
                        file.unlink(missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield True
    finally:
        os.close(handle)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return False
        raise CovNormError(f"{folder}: {error.strerror}: choose another folder as cache") from error
    return True
