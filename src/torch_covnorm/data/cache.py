"""Decoded images on disk: an .npy file a split, with a JSON record behind its rows.

A file that is not as it was written is made anew, so the folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..errors import CovNormError
from ..records import blame, checksum

AHEAD = 64  # images on their way to the one that comes next
LEFTOVER = re.compile(r"\.[0-9a-f]{32}\.npy\.[0-9a-f]{16}")
T = TypeVar("T")


class Rows(NamedTuple):
    """The readable images of a split (n, 3, size, size), a hash of each, and why others are not."""

    x: np.ndarray
    hashes: list[bytes]
    bad: dict[int, str]


class Memory(contextlib.nullcontext[None]):
    """Rows in memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        try:
            self.x, self.n = np.empty(shape, np.uint8), 0
        except MemoryError as error:
            raise CovNormError(f"the images need too much memory ({error}): use a cache") from None

    def add(self, row: np.ndarray) -> None:
        """Append an image (3, size, size)."""
        self.x[self.n] = row
        self.n += 1

    def finish(self, _hashes: list[bytes], _bad: dict[int, str]) -> np.ndarray:
        """All of them (n, 3, size, size)."""
        return self.x[: self.n]


class Stored:
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
        """Append an image (3, size, size)."""
        with blame(self.file):
            self.stream.write(row.data)
        self.n += 1

    def finish(self, hashes: list[bytes], bad: dict[int, str]) -> np.ndarray:
        """All of them (n, 3, size, size), mapped; the file has its name then."""
        record = _record(hashes, bad)
        with blame(self.file):
            self.stream.write(json.dumps({**record, "checksum": checksum(record)}).encode())
            self.stream.seek(0)
            self._header()
            self.stream.close()
            self.temporary.replace(self.file)
            return mapped(self.file)

    def _header(self) -> None:
        """As long for every n, because numpy leaves room for it."""
        about = {"descr": "|u1", "fortran_order": False, "shape": (self.n, *self.shape[1:])}
        np.lib.format.write_array_header_1_0(self.stream, about)


def _record(hashes: list[bytes], bad: dict[int, str]) -> dict[str, Any]:
    pixels = hashlib.sha256(b"".join(hashes)).hexdigest()
    return {"pixels": pixels, "unreadable": {str(i): reason for i, reason in bad.items()}}


def recalled(
    file: Path, shape: tuple[int, ...], pool: ThreadPoolExecutor, lost: Callable[[int], bool]
) -> Rows | None:
    """What a file keeps of images of this shape; None: there is none, or not as it was written.

    `lost` tells whether an image that could not be read then cannot be read now.
    """
    try:
        x = mapped(file)
        with file.open("rb") as stream:
            stream.seek(x.offset + x.nbytes)
            record = json.loads(stream.read())
        seal = record.pop("checksum")
        bad = {int(i): reason for i, reason in record["unreadable"].items()}
        rows = np.asarray(x)
        if rows.shape != (shape[0] - len(bad), *shape[1:]) or rows.dtype != np.uint8:
            return None
        hashes = list(in_order(pool, lambda i: hash_of(rows[i]), len(rows)))
        same = record == _record(hashes, bad) and seal == checksum(record)
        same = same and all(map(lost, bad))  # or else one was mended
    except Exception:  # whatever is wrong with it, it is made anew
        return None
    return Rows(rows, hashes, bad) if same else None


def mapped(file: Path) -> np.memmap:
    """The rows of a file, which nothing can change. Torch warns about what it cannot write to."""
    try:
        return np.lib.format.open_memmap(file, mode="c")  # what is written stays in memory
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return np.lib.format.open_memmap(file, mode="r")  # larger than all memory


@contextlib.contextmanager
def in_use(folder: Path | None) -> Iterator[bool]:
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


def in_order(pool: ThreadPoolExecutor, work: Callable[[int], T], n: int) -> Iterator[T]:
    """work(0), …, work(n - 1), with a bounded number of them ahead of what is taken."""
    waiting: deque[Future[T]] = deque()
    for i in range(n):
        waiting.append(pool.submit(work, i))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def hash_of(row: np.ndarray) -> bytes:
    """SHA-256 of an image's pixels."""
    return hashlib.sha256(row.data).digest()
