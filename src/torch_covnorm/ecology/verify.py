"""`verify`: check that every byte of an ecology is as it was written."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import CovNormError
from ..network import basis as basis_files
from ..network import files
from ..records import blame
from .manifest import RECORDS, Manifest
from .store import DETAILS, Ecology


def verify(
    folder: str | os.PathLike[str],
    backbone: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Return the problems of an ecology, one sentence each with the file's name; [] if none.

    Checks the checksums of all blobs, the records in them, that every domain belongs to this
    backbone and finds its basis and, with `backbone`, the backbone's own fingerprint.
    """
    try:
        ecology = Ecology(folder)
        domains, bases = ecology.domains, ecology.bases
    except CovNormError as error:
        return [str(error)]
    problems: list[tuple[str | None, str]] = []
    if backbone and ecology.backbone["name"] is not None:
        try:
            ecology.network()
        except CovNormError as error:
            problems.append((None, str(error)))
    fingerprints: dict[str, str] = {}
    owners = [("basis", name, blobs) for name, blobs in bases.items()]
    owners += [("domain", name, entry.blobs) for name, entry in domains.items()]
    for i, (owner, name, blobs) in enumerate(owners, 1):
        for part, blob in blobs.items():
            try:
                _check(ecology, part, blob, fingerprints, name if owner == "basis" else None)
            except CovNormError as error:
                problems.append((blob, f"{owner} {name!r}, {part}: {error}"))
        if progress is not None:
            progress(i, len(owners))
    if not problems:
        return []
    used = {None, *Manifest.read(ecology.file).references()}  # others may have removed some since
    return [text for blob, text in problems if blob in used]


def _check(
    ecology: Ecology, part: str, blob: str, fingerprints: dict[str, str], basis: str | None
) -> None:
    """Check one blob of a domain or, with `basis`, of that basis, and note its fingerprint."""
    if part not in RECORDS:
        ecology.blobs.read_tensors(blob)
        return
    if part == "details":
        ecology.blobs.read_record(blob, DETAILS)
        return
    record = ecology.blobs.read_record(blob, basis_files.FORMAT if basis else files.FORMAT)
    with blame(ecology.blobs.path(blob)):
        if record["backbone"]["fingerprint"] != ecology.backbone["fingerprint"]:
            raise CovNormError("was made for another backbone")
        if basis is not None:
            fingerprints[basis] = record["fingerprint"]
        elif record["basis"] is not None:
            shared = record["basis"]["name"]
            if fingerprints.get(shared) != record["basis"]["fingerprint"]:
                raise CovNormError(f"its basis {shared!r} is damaged, missing or a different one")
