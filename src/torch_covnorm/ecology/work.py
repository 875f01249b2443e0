"""Unfinished work in an ecology: a folder for one process at a time, kept until it is done."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CovNormError
from ..records import blame
from ..training.snapshot import Snapshot, SnapshotMismatch
from .lock import locked


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


def unfinished(work: Path, settings: dict[str, Any]) -> Snapshot:
    """Where the work stands; work that was begun with other settings is refused."""
    job = Snapshot(work / "job", settings)
    try:
        known = job.load()
    except CovNormError as error:
        reason = f"damaged: {error}"
        if isinstance(error, SnapshotMismatch):
            reason = f"with other settings or images ({error.key})"
        raise CovNormError(
            f"{work}: unfinished work is there, {reason}: give the same command as then to go on, "
            "or --fresh to begin anew"
        ) from None
    if known is None:
        job.save({})
    return job
