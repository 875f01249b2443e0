"""Decoded images on disk: one .npy file per split, followed by a JSON record about its rows.

A damaged file is made again, so the folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from ..errors import CovNormError
from ..records import blame, checksum, disk_bytes
from .image_files import ImageError

LOOKAHEAD = 64  # tasks that may be ahead of the result that is taken next
ROWS = re.compile(r"[0-9a-f]{32}\.npy")
LEFTOVER = re.compile(r"\.[0-9a-f]{32}\.npy\.[0-9a-f]{16}")
Shape = tuple[int, ...]
T = TypeVar("T")
Row = tuple[np.ndarray, bytes]  # an image (3, size, size) and the hash of its pixels


class Rows(NamedTuple):
    """The readable images of a split (n, 3, size, size), their hashes, and {index: why unreadable}.

    The index counts all images of the split.
    """

    x: np.ndarray
    hashes: list[bytes]
    unreadable: dict[int, str]


def collect_rows(results: Iterable[Row | ImageError], shape: Shape, file: Path | None) -> Rows:
    """Collect the images of a split in a file, or in memory if `file` is None.

    `shape` is (n, 3, size, size) for all n results.
    """
    rows = Rows(np.empty(0), [], {})

    def images() -> Iterator[np.ndarray]:
        for i, result in enumerate(results):
            if isinstance(result, ImageError):
                rows.unreadable[i] = result.reason
            else:
                rows.hashes.append(result[1])
                yield result[0]

    x = _in_memory(images(), shape) if file is None else _in_file(images(), shape, file, rows)
    return rows._replace(x=x)


def _in_memory(images: Iterable[np.ndarray], shape: Shape) -> np.ndarray:
    try:
        x = np.empty(shape, np.uint8)
    except MemoryError as error:
        raise CovNormError(f"not enough memory for the images ({error}). Use a cache.") from None
    n = 0
    for n, image in enumerate(images, 1):
        x[n - 1] = image
    return x[:n]


def _in_file(images: Iterable[np.ndarray], shape: Shape, file: Path, rows: Rows) -> np.ndarray:
    """Write a file that gets its final name when it is complete, and map it into memory.

    It is written as a stream, because writing to a memory map on a full disk would kill the
    process. Files are not synced: one that a power cut damages is detected and rebuilt.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with blame(file):
        stream = temporary.open("xb")
    try:
        _write_header(stream, shape)
        for image in images:
            with blame(file):
                stream.write(image.data)
        with blame(file):
            record = _record(rows.hashes, rows.unreadable)
            stream.write(json.dumps({**record, "checksum": checksum(record)}).encode())
            stream.seek(0)
            _write_header(stream, (len(rows.hashes), *shape[1:]))
            stream.close()
            temporary.replace(file)
            return open_rows(file)
    finally:
        with contextlib.suppress(OSError):  # `write` has already reported what cannot be flushed
            stream.close()
        temporary.unlink(missing_ok=True)


def _write_header(stream: BinaryIO, shape: Shape) -> None:
    """Write the .npy header, which numpy pads to the same length for every number of rows."""
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)


def _record(hashes: list[bytes], unreadable: dict[int, str]) -> dict[str, Any]:
    pixels = hashlib.sha256(b"".join(hashes)).hexdigest()
    return {"pixels": pixels, "unreadable": {str(i): why for i, why in unreadable.items()}}


def load_rows(
    file: Path, shape: Shape, pool: ThreadPoolExecutor, read: Callable[[int], Row | ImageError]
) -> Rows | None:
    """Load the rows of a file, or return None if there are none of this shape, or damaged ones.

    `read` reads an image again, to see whether one that was unreadable still is.
    """
    try:
        x = open_rows(file)
        with file.open("rb") as stream:
            stream.seek(x.offset + x.nbytes)
            record = json.loads(stream.read())
        seal = record.pop("checksum")
        unreadable = {int(i): why for i, why in record["unreadable"].items()}
        rows = np.asarray(x)
        if rows.shape != (shape[0] - len(unreadable), *shape[1:]) or rows.dtype != np.uint8:
            return None
        hashes = list(map_in_order(pool, lambda i: pixel_hash(rows[i]), len(rows)))
        same = record == _record(hashes, unreadable) and seal == checksum(record)
        same = same and all(isinstance(read(i), ImageError) for i in unreadable)
    except Exception:  # whatever is wrong with the file, it is made again
        return None
    return Rows(rows, hashes, unreadable) if same else None


def open_rows(file: Path) -> np.memmap:
    """Map the rows of a file into memory. Writing to them never changes the file.

    They are writable, because torch warns about arrays that are not.
    """
    try:
        return np.lib.format.open_memmap(file, mode="c")
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return np.lib.format.open_memmap(file, mode="r")  # larger than all memory


@contextlib.contextmanager
def cache_in_use(folder: Path | None) -> Iterator[bool]:
    """Mark the folder as in use, and yield whether it is writable.

    Files left by killed processes are removed first, unless another process uses the folder.
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


def cached_files(folder: Path) -> list[Path]:
    """Return the files of a cache, those of killed processes included."""
    if not folder.is_dir():
        return []
    names = (ROWS, LEFTOVER)
    return [f for f in folder.iterdir() if any(name.fullmatch(f.name) for name in names)]


def clear_cache(
    folder: Path, names: Container[str] | None = None, dry_run: bool = False
) -> int | None:
    """Remove the files of a cache, or those of these names, and return their bytes.

    None if another process is decoding images into it. With `dry_run`, nothing is removed.
    """
    files = [f for f in cached_files(folder) if names is None or f.name in names]
    if not files:
        return 0
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except (ImportError, OSError):  # no locks on Windows and on some disks
            pass
        freed = disk_bytes(files)
        for file in [] if dry_run else files:
            with blame(file):
                file.unlink(missing_ok=True)
        return freed
    finally:
        os.close(handle)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return False
        raise CovNormError(f"{folder}: {error.strerror}. Choose another cache folder.") from error
    return True


def map_in_order(pool: ThreadPoolExecutor, task: Callable[[int], T], n: int) -> Iterator[T]:
    """Yield task(0), …, task(n - 1), with a bounded number of tasks in advance."""
    futures = (pool.submit(task, i) for i in range(n))
    waiting = deque(itertools.islice(futures, LOOKAHEAD))
    while waiting:
        waiting.extend(itertools.islice(futures, 1))
        yield waiting.popleft().result()


def pixel_hash(row: np.ndarray) -> bytes:
    """Return the SHA-256 of an image's pixels."""
    return hashlib.sha256(row.data).digest()
