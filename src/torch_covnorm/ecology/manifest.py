"""The manifest of an ecology: the blobs in use, and enough about every domain for a list."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, fields
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


@dataclass(frozen=True)
class Manifest:
    """The whole manifest: the backbone's description, domains by name, blobs of bases by name."""

    backbone: dict[str, Any]
    domains: dict[str, Entry] = field(default_factory=dict)
    bases: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Read and check a manifest. Its checksum may fit although someone has forged it."""
        record = read(file, FORMAT)
        with blame(file):
            backbone, bases, domains = (record[key] for key in ("backbone", "bases", "domains"))
            if missing := BACKBONE - set(backbone):
                raise CovNormError(f"the backbone lacks the keys {', '.join(sorted(missing))}")
            if backbone["weights"] is not None:
                _check_blob(backbone["weights"], "safetensors")
            for name, blobs in bases.items():
                _check_blobs(f"basis {check_name(name)!r}", blobs, {"record", "tensors"})
            for name, entry in domains.items():
                _check_entry(f"domain {check_name(name)!r}", entry, bases)
            return cls(backbone, {n: Entry(**entry) for n, entry in domains.items()}, bases)

    def write(self, file: Path) -> None:
        """Replace the manifest, whole or not at all."""
        record = {**vars(self), "domains": {n: vars(entry) for n, entry in self.domains.items()}}
        with blame(file):
            write_file(file, sealed(FORMAT, record, indent=None))

    def references(self) -> set[str]:
        """Return the names of all blobs in use."""
        owners = [*self.bases.values(), *(entry.blobs for entry in self.domains.values())]
        weights = {self.backbone["weights"]} - {None}
        return weights.union(*(blobs.values() for blobs in owners))


def _check_entry(owner: str, entry: dict[str, Any], bases: Container[str]) -> None:
    if wrong := set(entry) ^ {field.name for field in fields(Entry)}:
        raise CovNormError(f"{owner}: missing or unknown keys: {', '.join(sorted(wrong))}")
    _check_blobs(owner, entry["blobs"], NEEDED)
    if ("trained.record" in entry["blobs"]) != ("trained.tensors" in entry["blobs"]):
        raise CovNormError(f"{owner}: needs both trained.record and trained.tensors")
    if entry["basis"] is not None and entry["basis"] not in bases:
        raise CovNormError(f"{owner}: its basis {entry['basis']!r} is missing")


def _check_blobs(owner: str, blobs: dict[str, str], needed: set[str]) -> None:
    if missing := needed - set(blobs):
        raise CovNormError(f"{owner}: the blobs {', '.join(sorted(missing))} are missing")
    for part, blob in blobs.items():
        _check_blob(blob, "json" if part in RECORDS else "safetensors")


def _check_blob(blob: str, ending: str) -> None:
    if not isinstance(blob, str) or not (match := BLOB.fullmatch(blob)) or match[2] != ending:
        raise CovNormError(f"{blob!r} is not the name of a .{ending} blob")
