"""The images of a domain: decoded once, kept in the ecology's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..data.decode import Decoded, decode
from ..data.source import Source, read_source
from ..errors import CovNormError
from .prediction import check_preprocessing
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
    """The images that a domain was made from, in the same parts; or others, from a path.

    Where they have changed since, they are refused: parts and labels would be other ones.
    """
    record, told = ecology.record(name), ecology.details(name).get("source", {})
    how = check_preprocessing(record["preprocessing"], name)
    if path is not None:
        source = read_source(path, seed=told.get("seed", 0))
        return decode_for(ecology, source, how["size"], how["fit"], progress=progress)
    if "path" not in told:
        raise CovNormError(f"domain {name!r}: the store does not say where its images are")
    where = Path(told["path"])
    if not where.exists():
        raise CovNormError(f"{where}: the images of domain {name!r} are not there any more")
    source = read_source(where, seed=told.get("seed", 0))
    data = decode_for(ecology, source, how["size"], how["fit"], limit=1.0, progress=progress)
    if data.digest != told.get("digest", data.digest) or list(data.classes) != record["classes"]:
        raise CovNormError(
            f"{where}: these images have changed since domain {name!r} was made: restore them, "
            "name others, or add it again with --replace"
        )
    return data
