"""`verify`: whether every byte of an ecology is as it was written."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from ..errors import CovNormError
from ..network import basis as basis_files
from ..network import files
from ..records import blame
from .manifest import RECORDS, read_manifest, references
from .store import DETAILS, Ecology


def verify(
    folder: str | os.PathLike[str],
    backbone: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """What is wrong with an ecology, a sentence each that names the file; empty: nothing.

    Checksums of all blobs, the records inside, that domains belong to this backbone and find their
    basis. `backbone`: load it too and compare its fingerprint.
    """
    try:
        ecology = Ecology(folder)
        domains, bases = ecology.domains, ecology.bases
    except CovNormError as error:
        return [str(error)]
    problems: list[tuple[str | None, str]] = []
    if backbone and ecology.backbone["name"] is not None:
        problems += [(None, p) for p in _told(ecology.network)]
    fingerprints: dict[str, str] = {}
    for name, blobs in bases.items():
        for part, blob in blobs.items():
            found = _told(partial(_check, ecology, part, blob, fingerprints, name))
            problems += [(blob, f"basis {name!r}, {part}: {p}") for p in found]
    for i, (name, entry) in enumerate(domains.items(), 1):
        for part, blob in entry.blobs.items():
            found = _told(partial(_check, ecology, part, blob, fingerprints))
            problems += [(blob, f"domain {name!r}, {part}: {p}") for p in found]
        if progress is not None:
            progress(i, len(domains))
    if not problems:
        return []
    still = {None, *references(read_manifest(ecology.file))}  # others may have removed some
    return [text for blob, text in problems if blob in still]


def _told(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except CovNormError as error:
        return [str(error)]
    return []


def _check(
    ecology: Ecology, part: str, blob: str, fingerprints: dict[str, str], basis: str | None = None
) -> None:
    """One blob: of a domain, or of a basis by its name, whose fingerprint is noted."""
    if part not in RECORDS:
        ecology.blobs.read_tensors(blob)
        return
    format_ = DETAILS if part == "details" else files.FORMAT
    record = ecology.blobs.read_record(blob, format_ if basis is None else basis_files.FORMAT)
    if part == "details":
        return
    with blame(ecology.blobs.path(blob)):
        if record["backbone"]["fingerprint"] != ecology.backbone["fingerprint"]:
            raise CovNormError("was made for another backbone")
        if basis is not None:
            fingerprints[basis] = record["fingerprint"]
        elif record["basis"] is not None:
            shared = record["basis"]["name"]
            if fingerprints.get(shared) != record["basis"]["fingerprint"]:
                raise CovNormError(f"its basis {shared!r} is damaged, missing or another")
