"""The images of a domain, decoded once and kept in the ecology's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..data.decode import Decoded, decode, merged
from ..data.source import Source, read_source
from ..errors import CovNormError
from .prediction import check_preprocessing, input_shape
from .store import Ecology


def decode_for(
    ecology: Ecology, source: Source, size: int | None = None, fit: str = "squash", **options: Any
) -> Decoded:
    """Decode a source for the ecology's backbone, at most at the backbone's size.

    options: `background`, `strict`, `limit` and `progress` of `decode`.
    """
    options["size_limit"] = ecology.backbone["preprocessing"]["size"]
    return decode(source, size, fit, cache=ecology.folder / "cache", **options)


def images_of(
    ecology: Ecology,
    name: str,
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """Decode the images that a domain was made from, in the same splits, or those of a path.

    Images that have changed since are refused, because splits and labels would differ.
    """
    record, source = ecology.record(name), ecology.details(name).get("source", {})
    shape = input_shape(check_preprocessing(record["preprocessing"], name))
    made: dict[str, Any] = shape._asdict()
    read: Callable[..., Decoded] = partial(decode_for, ecology, **made, progress=progress)
    seed = source.get("seed", 0)
    if path is not None:
        return read(read_source(path, seed=seed))
    if "path" not in source:
        raise CovNormError(
            f"domain {name!r}: the store does not know where its images are: pass their folder"
        )
    folder = Path(source["path"])
    if not folder.exists():
        raise CovNormError(
            f"{folder}: the images of domain {name!r} are no longer there: pass their new folder"
        )
    data = read(read_source(folder, seed=seed), limit=1.0)
    for more in source.get("more", ()):  # what `add --update` added since
        data = merged(data, read(read_source(more, seed=seed), limit=1.0))
    if data.digest != source.get("digest", data.digest) or list(data.classes) != record["classes"]:
        raise CovNormError(
            f"{folder}: the images have changed since domain {name!r} was made. Restore them, "
            "pass other images, or add the domain again with --replace."
        )
    return data
