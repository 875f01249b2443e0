"""`verify`: check that every byte of an ecology is as it was written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import CovNormError, CovNormWarning
from ..network import basis as basis_files
from ..network import files
from ..records import blame
from .code import CodeNotApproved
from .manifest import RECORDS, Manifest
from .store import DETAILS, Ecology


class Owner(NamedTuple):
    """A domain, a basis or a version: what messages call it, its blobs, and a basis' name."""

    label: str
    blobs: dict[str, str]
    basis: str | None = None


def verify(
    folder: str | os.PathLike[str],
    backbone: bool = True,
    progress: Callable[[int, int], None] | None = None,
    trust_code: bool = False,
) -> list[str]:
    """Return the problems of an ecology, one sentence each with the file's name; [] if none.

    Checks the checksums of all blobs, those of earlier versions included, the records in them, that
    every domain belongs to this backbone and finds its basis and, with `backbone`, the backbone's
    own fingerprint. Of a backbone that is code, which this user has not approved and `trust_code`
    does not allow to run, only the files are checked.
    """
    try:
        ecology = Ecology(folder, trust_code)
        domains, bases, versions = ecology.domains, ecology.bases, ecology.versions
    except CovNormError as error:
        return [str(error)]
    problems: list[tuple[str | None, str]] = []
    if backbone and ecology.backbone["name"] is not None:
        try:
            _check_backbone(ecology)
        except CovNormError as error:
            problems.append((None, str(error)))
    owners = _bases(bases) + [Owner(f"domain {n!r}", e.blobs) for n, e in domains.items()]
    groups = [owners]  # each has its own bases: those of earlier versions may differ from today's
    for name, earlier in versions.items():
        for i, version in enumerate(earlier, 1):
            entry, shared = version.entry, version.basis
            owner = Owner(f"version {i} of domain {name!r}", entry.blobs)
            groups.append([*_bases({entry.basis: shared} if entry.basis and shared else {}), owner])
    done, total = 0, sum(map(len, groups))
    for group in groups:
        fingerprints: dict[str, str] = {}
        for owner in group:
            for part, blob in owner.blobs.items():
                try:
                    _check(ecology, part, blob, fingerprints, owner.basis)
                except CovNormError as error:
                    problems.append((blob, f"{owner.label}, {part}: {error}"))
            done += 1
            if progress is not None:
                progress(done, total)
    if not problems:
        return []
    used = {None, *Manifest.read(ecology.file).references()}  # others may have removed some since
    return [text for blob, text in problems if blob in used]


def _bases(bases: Mapping[str, dict[str, str]]) -> list[Owner]:
    return [Owner(f"basis {name!r}", blobs, name) for name, blobs in bases.items()]


def _check_backbone(ecology: Ecology) -> None:
    """Check the fingerprint, or only the checksums if that would run code that must not run."""
    try:
        ecology.network()
    except CodeNotApproved:
        ecology.blobs.read(ecology.backbone["weights"])
        warnings.warn(
            "the backbone is code that was not approved here and did not run, so only its files "
            "were checked. Pass --trust-code (trust_code=True) to check its fingerprint.",
            CovNormWarning,
            stacklevel=3,
        )


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
