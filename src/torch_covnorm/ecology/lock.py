"""One writer at a time, among all processes and threads of a machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import CovNormError
from ..records import blame


@contextlib.contextmanager
def locked(file: Path, busy: str | None = None) -> Iterator[None]:
    """Hold the lock of a file; another holder is waited for, or refused with the words `busy`.

    The kernel keeps the lock and lets it go with its process, so kill −9 leaves none behind.
    """
    import fcntl  # not on Windows

    with blame(file):
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise CovNormError(str(busy)) from None
        yield
    finally:
        os.close(handle)
