"""Unfinished work inside an ecology: a folder for one process, kept until the work is done."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CovNormError
from ..records import blame
from ..snapshot import Snapshot
from .lock import locked


@contextlib.contextmanager
def workplace(folder: Path, busy: str, fresh: bool) -> Iterator[Path]:
    """A folder of this process alone; it goes when the work is done, and stays when it is not.

    Another process at the same work is refused with the words `busy`; `fresh` begins anew.
    """
    with blame(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}"), busy):
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def unfinished(work: Path, settings: dict[str, Any]) -> Snapshot:
    """Where the work stands; work that was begun with other settings is refused."""
    job = Snapshot(work / "job", settings)
    try:
        if job.load() is None:
            job.save({})
    except CovNormError as error:
        raise CovNormError(f"{error}; --fresh does that") from None
    return job
