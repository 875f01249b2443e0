"""`gc` and `remove --purge`: free what is kept beside the domains."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ..data.cache import clear_cache
from ..data.decode import cached_names
from ..data.source import read_source
from ..errors import CovNormError
from ..network import files
from .manifest import Entry
from .prediction import check_preprocessing, input_shape
from .store import DETAILS, Ecology
from .work import clear_unfinished, workplace


def collect_garbage(
    ecology: Ecology, keep: int | None = None, cache: bool = False, dry_run: bool = False
) -> dict[str, Any]:
    """Free what no domain needs now, and return the bytes by kind.

    That is: versions of removed domains, blobs that killed processes have left, and unfinished
    work. What other processes are using stays, and is named under "in_use".

    Args:
        keep: also delete all but the last `keep` versions of every domain, removed ones included.
        cache: also delete the decoded images.
        dry_run: only count.
    """
    freed = {**ecology.drop_versions(keep, dry_run), "work": 0, "cache": 0}
    in_use: list[str] = []
    for kind in ("domains", "bases"):
        found, busy = clear_unfinished(ecology.folder / "work" / kind, dry_run)
        freed["work"] += found
        in_use += [f"work on {name}" for name in busy]
    if cache:
        cleared = clear_cache(ecology.folder / "cache", dry_run=dry_run)
        freed["cache"] = cleared or 0
        in_use += ["cache"] * (cleared is None)
    return {"freed": freed, "total": sum(freed.values()), "in_use": in_use, "dry_run": dry_run}


def purge(ecology: Ecology, names: Sequence[str]) -> None:
    """Remove domains with all their versions, unfinished work and cached images.

    Images that are no longer where they were cannot be found in the cache; they stay there.
    """
    entries = ecology.domains
    cached: set[str] = set()
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(names):
            if (place := ecology.workplace(name)).exists():
                busy = f"{ecology.folder}: another process is adding domain {name!r}: stop it first"
                stack.enter_context(workplace(place, busy, fresh=False))
            found = [v.entry for v in ecology.versions.get(name, ())]
            for entry in [*found, *([entries[name]] if name in entries else [])]:
                with contextlib.suppress(CovNormError):
                    cached |= _cached(ecology, name, entry)
        ecology.remove(names, purge=True)
    clear_cache(ecology.folder / "cache", cached)


def _cached(ecology: Ecology, name: str, entry: Entry) -> set[str]:
    """Return the names of the files in the cache that hold the images of a domain."""
    source = ecology.blobs.read_record(entry.blobs["details"], DETAILS).get("source", {})
    record = ecology.blobs.read_record(entry.blobs["record"], files.FORMAT)
    if "path" not in source:
        return set()
    inputs = input_shape(check_preprocessing(record["preprocessing"], name))
    seed, names = source.get("seed", 0), set()
    for path in (source["path"], *source.get("more", ())):
        names |= cached_names(read_source(path, seed=seed), inputs)
    return names
