"""One writer at a time, among all processes and threads of a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import CovNormError
from ..records import blame


@contextlib.contextmanager
def locked(file: Path, busy: str | None = None) -> Iterator[None]:
    """Hold a lock file. If another holds it, wait; with `busy`, raise that message at once.

    The kernel keeps the lock and releases it with the process, so kill −9 leaves no lock held.
    """
    # A soft lock would survive kill −9: a disk without flock must be an error instead.
    lock = FileLock(file, blocking=busy is None, poll_interval=0.01, fallback_to_soft=False)
    with blame(file), contextlib.suppress(Timeout):
        file.parent.stat()  # FileLock would create a missing folder
        lock.acquire()
    if not lock.is_locked:
        raise CovNormError(busy)
    try:
        yield
    finally:
        lock.release()
