"""The images of a domain: decoded once, kept in the ecology's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..data.decode import Decoded, decode
from ..data.source import Source, read_source
from ..errors import CovNormError
from .store import Ecology


def decode_for(
    ecology: Ecology,
    source: Source,
    size: int | None = None,
    fit: str = "squash",
    *,
    strict: bool = False,
    limit: float = 0.05,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """The images of a source as the ecology's backbone may read them: at most of its own size."""
    return decode(
        source,
        size,
        fit,
        size_limit=ecology.backbone["preprocessing"]["size"],
        cache=ecology.folder / "cache",
        strict=strict,
        limit=limit,
        progress=progress,
    )


def images_of(
    ecology: Ecology,
    name: str,
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """The images that a domain was made from, in the same parts; or others, from a path."""
    record, told = ecology.record(name), ecology.details(name).get("source", {})
    if path is None and "path" not in told:
        raise CovNormError(f"domain {name!r}: its store does not say where its images are")
    where = Path(told["path"]) if path is None else Path(path)
    if not where.exists():
        raise CovNormError(f"{where}: the images of domain {name!r} are not there any more")
    source = read_source(where, seed=told.get("seed", 0))
    how = record["preprocessing"]
    return decode_for(ecology, source, how["size"], how["fit"], progress=progress)
