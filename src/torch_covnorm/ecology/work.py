"""Unfinished work inside an ecology: a folder for one process, kept until the work is done."""

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
    """A folder of this process alone; it goes when the work is done, and stays when it is not.

    Another process at the same work is refused with the words `busy`; `fresh` begins anew.
    """
    with blame(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}"), busy):
        for left in folder.parent.glob(f".{folder.name}~*"):  # "~" is in no domain's name
            shutil.rmtree(left, ignore_errors=True)
        if fresh:
            _clear(folder)
        yield folder
        _clear(folder)


def _clear(folder: Path) -> None:
    """Remove a folder at once: half of it would not be what any step had left."""
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
