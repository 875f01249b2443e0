"""The manifest of an ecology: the blobs in use, and enough about every domain for a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import CovNormError
from ..network.domain import check_name
from ..records import blame, read, sealed, write_file
from .blobs import BLOB

FORMAT = "torch-covnorm ecology"
MANIFEST = "ecology.json"
BACKBONE = {"name", "class", "weights", "fingerprint", "parameters", "bytes", "preprocessing"}
NEEDED = {"record", "tensors", "details"}
RECORDS = ("record", "details", "trained.record")  # the other parts are tensors


@dataclass(frozen=True)
class Entry:
    """A domain in the manifest.

    method: the name of the method that made it.
    classes: the number of classes; None for a feature extractor.
    accuracy: in percent, on the held-out split; None if it was not measured.
    parameters: of the adapters, as the paper counts them.
    total: all parameters of the domain, norms and head included.
    bytes: the size of "record" and "tensors", which is all that a device needs.
    basis: the name of the shared basis, if any.
    blobs: {part: blob name}. Every domain has "record" and "tensors" (the domain itself) and
        "details" (method, settings, source, results, history). Some have "trained.record" and
        "trained.tensors" (the domain with its full A's), "moments" (of A's input) and "examples".
    """

    method: str
    classes: int | None
    accuracy: float | None
    parameters: int
    total: int
    bytes: int
    basis: str | None
    blobs: dict[str, str]


def read_manifest(file: Path) -> dict[str, Any]:
    """Return ``{"backbone", "domains": {name: entry}, "bases": {name: blobs}}``, all checked."""
    manifest = read(file, FORMAT)
    with blame(file):
        _check(manifest)
    return {key: manifest[key] for key in ("backbone", "domains", "bases")}


def write_manifest(file: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest, whole or not at all."""
    with blame(file):
        write_file(file, sealed(FORMAT, dict(manifest), indent=None))


def references(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Yield the names of the blobs that a manifest uses."""
    if manifest["backbone"]["weights"] is not None:
        yield manifest["backbone"]["weights"]
    for basis in manifest["bases"].values():
        yield from basis.values()
    for entry in manifest["domains"].values():
        yield from entry["blobs"].values()


def _check(manifest: dict[str, Any]) -> None:
    """Refuse a malformed manifest even if its checksum fits: someone may have forged it."""
    backbone, domains, bases = (manifest[key] for key in ("backbone", "domains", "bases"))
    if missing := BACKBONE - set(backbone):
        raise CovNormError(f"the backbone lacks the keys {', '.join(sorted(missing))}")
    if backbone["weights"] is not None:
        _check_blob(backbone["weights"], "safetensors")
    for name, blobs in bases.items():
        check_name(name)
        _check_blobs(f"basis {name!r}", blobs, {"record", "tensors"})
    keys = {field.name for field in fields(Entry)}
    for name, entry in domains.items():
        check_name(name)
        if set(entry) != keys:
            wrong = ", ".join(sorted(set(entry) ^ keys))
            raise CovNormError(f"domain {name!r}: missing or unknown keys: {wrong}")
        _check_blobs(f"domain {name!r}", entry["blobs"], NEEDED)
        if ("trained.record" in entry["blobs"]) != ("trained.tensors" in entry["blobs"]):
            raise CovNormError(f"domain {name!r}: needs both trained.record and trained.tensors")
        if entry["basis"] is not None and entry["basis"] not in bases:
            raise CovNormError(f"domain {name!r}: its basis {entry['basis']!r} is missing")


def _check_blobs(owner: str, blobs: dict[str, str], needed: set[str]) -> None:
    if missing := needed - set(blobs):
        raise CovNormError(f"{owner}: the blobs {', '.join(sorted(missing))} are missing")
    for part, blob in blobs.items():
        _check_blob(blob, "json" if part in RECORDS else "safetensors")


def _check_blob(blob: str, ending: str) -> None:
    if not isinstance(blob, str) or not (match := BLOB.fullmatch(blob)) or match[2] != ending:
        raise CovNormError(f"{blob!r} is not the name of a .{ending} blob")
