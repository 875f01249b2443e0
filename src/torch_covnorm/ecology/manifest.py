"""The manifest of an ecology: which blobs count, and enough of every domain for a list."""

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
RECORDS = ("record", "details", "trained.record")  # the others are tensors


@dataclass(frozen=True)
class Entry:
    """A domain as the manifest has it: enough for a list, and the names of its blobs.

    parameters: of its adapters, as the paper counts. bytes: what a device needs to have it, its
    tensors and their record. blobs: "record" and "tensors" (the domain), "details" (method,
    settings, results, history); where there are any, "trained.record" and "trained.tensors" (it
    with its full A's), "moments" (of A's input) and "examples".
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
    """``{"backbone", "domains": {name: entry}, "bases": {name: blobs}}``, all of it checked."""
    manifest = read(file, FORMAT)
    with blame(file):
        _check(manifest)
    return {key: manifest[key] for key in ("backbone", "domains", "bases")}


def write_manifest(file: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest, whole or not at all."""
    with blame(file):
        write_file(file, sealed(FORMAT, dict(manifest), indent=None))


def references(manifest: Mapping[str, Any]) -> Iterable[str]:
    """The blobs that a manifest names."""
    if manifest["backbone"]["weights"] is not None:
        yield manifest["backbone"]["weights"]
    for basis in manifest["bases"].values():
        yield from basis.values()
    for entry in manifest["domains"].values():
        yield from entry["blobs"].values()


def _check(manifest: dict[str, Any]) -> None:
    """Refuse what is no manifest, though its checksum fits: nothing in it is used before this."""
    backbone, domains, bases = (manifest[key] for key in ("backbone", "domains", "bases"))
    if missing := BACKBONE - set(backbone):
        raise CovNormError(f"says nothing of the backbone's {', '.join(sorted(missing))}")
    if backbone["weights"] is not None:
        _check_blob(backbone["weights"], "safetensors")
    for name, blobs in bases.items():
        check_name(name)
        _check_blobs(name, blobs, {"record", "tensors"})
    keys = {field.name for field in fields(Entry)}
    for name, entry in domains.items():
        check_name(name)
        if set(entry) != keys:
            raise CovNormError(f"domain {name!r}: {', '.join(sorted(set(entry) ^ keys))}")
        _check_blobs(name, entry["blobs"], NEEDED)
        if ("trained.record" in entry["blobs"]) != ("trained.tensors" in entry["blobs"]):
            raise CovNormError(f"domain {name!r}: has half of a trained part")
        if entry["basis"] is not None and entry["basis"] not in bases:
            raise CovNormError(f"domain {name!r}: shares a basis that is not there")


def _check_blobs(name: str, blobs: dict[str, str], needed: set[str]) -> None:
    if missing := needed - set(blobs):
        raise CovNormError(f"{name!r} has no {', '.join(sorted(missing))}")
    for part, blob in blobs.items():
        _check_blob(blob, "json" if part in RECORDS else "safetensors")


def _check_blob(blob: str, ending: str) -> None:
    if not isinstance(blob, str) or not (found := BLOB.fullmatch(blob)) or found[2] != ending:
        raise CovNormError(f"{blob!r} is no name of a blob ending in .{ending}")
