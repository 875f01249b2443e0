"""`verify`: whether every byte of an ecology is as it was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from .. import basis as basis_files
from .. import files
from ..errors import CovNormError
from .store import DETAILS, Ecology

RECORDS = {"record": files.FORMAT, "trained.record": files.FORMAT, "details": DETAILS}


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
        if backbone and ecology.backbone["name"] is not None:
            ecology.network()
    except CovNormError as error:
        return [str(error)]
    problems: list[str] = []
    fingerprints: dict[str, str] = {}
    for name, blobs in bases.items():
        try:
            record = ecology.blobs.read_record(blobs["record"], basis_files.FORMAT)
            for part in set(blobs) - {"record"}:
                ecology.blobs.read_tensors(blobs[part])
            fingerprints[name] = record["fingerprint"]
        except CovNormError as error:
            problems.append(f"basis {name!r}: {error}")
    for i, (name, entry) in enumerate(domains.items(), 1):
        for part, blob in entry.blobs.items():
            found = _check(ecology, part, blob, fingerprints)
            problems += [f"domain {name!r}, {part}: {p}" for p in found]
        if progress is not None:
            progress(i, len(domains))
    return problems


def _check(ecology: Ecology, part: str, blob: str, fingerprints: dict[str, str]) -> Iterator[str]:
    """One blob of a domain."""
    try:
        if part not in RECORDS:
            ecology.blobs.read_tensors(blob)
            return
        record = ecology.blobs.read_record(blob, RECORDS[part])
    except CovNormError as error:
        yield str(error)
        return
    if part == "details":
        return
    file, basis = ecology.blobs.path(blob), record["basis"]
    if record["backbone"]["fingerprint"] != ecology.backbone["fingerprint"]:
        yield f"{file}: was made for another backbone"
    if basis is not None and fingerprints.get(basis["name"]) != basis["fingerprint"]:
        yield f"{file}: its shared basis {basis['name']!r} is damaged, missing or another"
