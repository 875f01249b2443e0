"""One writer at a time, and the folders of unfinished work, which a killed run resumes from."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import CovNormError
from ..records import blame, disk_bytes
from ..training.snapshot import Snapshot, SnapshotMismatch


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


@contextlib.contextmanager
def workplace(folder: Path, busy: str, fresh: bool) -> Iterator[Path]:
    """Yield a work folder that no other process uses; delete it only if the work succeeds.

    A second process at the same work gets the error message `busy`. `fresh` starts over.
    """
    with blame(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}"), busy):
        for leftover in folder.parent.glob(f".{folder.name}~*"):  # no domain name contains "~"
            shutil.rmtree(leftover, ignore_errors=True)
        if fresh:
            _clear(folder)
        yield folder
        _clear(folder)


def _clear(folder: Path) -> None:
    """Delete a folder in one step, so that kill −9 cannot leave half of it to the next run."""
    if folder.exists():
        away = folder.with_name(f".{folder.name}~{secrets.token_hex(8)}")
        with blame(folder):
            folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def clear_unfinished(folder: Path, dry_run: bool = False) -> tuple[int, list[str]]:
    """Delete the work folders in a folder that no process uses.

    Returns their bytes, and the names of those in use. With `dry_run`, nothing is deleted.
    """
    freed, busy = 0, []
    found = [place for place in folder.glob("*") if place.is_dir()]
    for name in sorted({place.name.partition("~")[0].removeprefix(".") for place in found}):
        places = [p for p in found if p.name == name or p.name.startswith(f".{name}~")]
        held = workplace(folder / name, name, fresh=False)
        try:
            with locked(folder / f".{name}", name) if dry_run else held:
                freed += disk_bytes(file for place in places for file in place.rglob("*"))
        except CovNormError as error:
            if str(error) != name:  # a full disk, a read-only folder
                raise
            busy.append(name)
    return freed, busy


def unfinished(work: Path, settings: dict[str, Any]) -> Snapshot:
    """Return the state of the work; refuse work that was begun with other settings."""
    job = Snapshot(work / "job", settings)
    try:
        known = job.load()
    except CovNormError as error:
        reason = f"is damaged ({error})"
        if isinstance(error, SnapshotMismatch):
            reason = f"has other settings or images ({error.key})"
        raise CovNormError(
            f"{work}: the unfinished work {reason}: continue it with the same command as before, "
            "or discard it with --fresh"
        ) from None
    if known is None:
        job.save({})
    return job
