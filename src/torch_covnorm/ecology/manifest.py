"""The manifest of an ecology: the blobs in use, and enough about every domain for a list."""

from __future__ import annotations

import hashlib
import json
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
KEEP = 3  # earlier versions of a domain, unless the ecology says otherwise


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
class Version:
    """A domain as it is or was: its entry, and the blobs of the basis that it shares, if any."""

    entry: Entry
    basis: dict[str, str] | None

    @property
    def digest(self) -> str:
        """SHA-256 of the names of its blobs; the moments of a basis grow and do not count."""
        basis = self.basis and [self.entry.basis, self.basis["tensors"]]
        parts = [sorted(self.entry.blobs.items()), basis]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def blobs(self) -> list[str]:
        """All its blobs, those of the basis included."""
        return [*self.entry.blobs.values(), *(self.basis or {}).values()]


@dataclass(frozen=True)
class Manifest:
    """The whole manifest.

    backbone: its description.
    domains, bases: entries of domains and blobs of bases by name, as they are now.
    keep: the number of earlier versions that are kept of every domain.
    earlier: {domain: its earlier versions, the one that was current last first}. Removed domains
        are among them.
    """

    backbone: dict[str, Any]
    domains: dict[str, Entry] = field(default_factory=dict)
    bases: dict[str, dict[str, str]] = field(default_factory=dict)
    keep: int = KEEP
    earlier: dict[str, list[Version]] = field(default_factory=dict)

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
            if "code" in backbone:
                _check_code(backbone["code"])
            for name, blobs in bases.items():
                _check_blobs(f"basis {check_name(name)!r}", blobs, {"record", "tensors"})
            for name, entry in domains.items():
                _check_entry(f"domain {check_name(name)!r}", entry, bases)
            # Stores of version 0.1 lack the next two keys.
            keep, earlier = record.get("keep", KEEP), record.get("earlier", {})
            if type(keep) is not int or keep < 0:
                raise CovNormError(f"keep={keep!r} is not a number of versions")
            kept = {n: _versions(check_name(n), given) for n, given in earlier.items()}
            entries = {n: Entry(**entry) for n, entry in domains.items()}
            return cls(backbone, entries, bases, keep, kept)

    def write(self, file: Path) -> None:
        """Replace the manifest, whole or not at all."""
        record = {
            **vars(self),
            "domains": {name: vars(entry) for name, entry in self.domains.items()},
            "earlier": {
                name: [{"entry": vars(v.entry), "basis": v.basis} for v in versions]
                for name, versions in self.earlier.items()
            },
        }
        with blame(file):
            write_file(file, sealed(FORMAT, record, indent=None))

    def copy(self, keep: int | None = None) -> Manifest:
        """Return a copy whose domains, bases and versions can be changed, maybe with another keep.

        The lists of versions are shared: replace them.
        """
        keep = self.keep if keep is None else keep
        parts = dict(self.domains), dict(self.bases), keep, dict(self.earlier)
        return Manifest(self.backbone, *parts)

    def current(self, name: str) -> Version:
        """Return a domain as it is now, with the basis that it shares."""
        entry = self.domains[name]
        return Version(entry, None if entry.basis is None else self.bases[entry.basis])

    def references(self) -> set[str]:
        """Return the names of all blobs in use."""
        owners = [*self.bases.values(), *(entry.blobs for entry in self.domains.values())]
        earlier = [version.blobs for versions in self.earlier.values() for version in versions]
        code = self.backbone.get("code", {})
        weights = {self.backbone["weights"], code.get("source")} - {None}
        return weights.union(*(blobs.values() for blobs in owners), *earlier)


def _check_code(code: dict[str, Any]) -> None:
    name = code["function"]
    if set(code) != {"source", "function"} or not (isinstance(name, str) and name.isidentifier()):
        raise CovNormError("the backbone's code needs a source and the name of a function")
    _check_blob(code["source"], "py")


def _check_entry(owner: str, entry: dict[str, Any], bases: Container[str]) -> None:
    if wrong := set(entry) ^ {field.name for field in fields(Entry)}:
        raise CovNormError(f"{owner}: missing or unknown keys: {', '.join(sorted(wrong))}")
    _check_blobs(owner, entry["blobs"], NEEDED)
    if ("trained.record" in entry["blobs"]) != ("trained.tensors" in entry["blobs"]):
        raise CovNormError(f"{owner}: needs both trained.record and trained.tensors")
    if entry["basis"] is not None and entry["basis"] not in bases:
        raise CovNormError(f"{owner}: its basis {entry['basis']!r} is missing")


def _versions(name: str, given: list[dict[str, Any]]) -> list[Version]:
    """Check and return the earlier versions of a domain."""
    if not isinstance(given, list) or not given:
        raise CovNormError(f"the versions of domain {name!r} must be a list with at least one")
    for i, version in enumerate(given, 1):
        owner = f"version {i} of domain {name!r}"
        if wrong := set(version) ^ {field.name for field in fields(Version)}:
            raise CovNormError(f"{owner}: missing or unknown keys: {', '.join(sorted(wrong))}")
        entry, basis = version["entry"], version["basis"]
        if (entry["basis"] is None) != (basis is None):
            raise CovNormError(f"{owner}: has a basis without its blobs, or blobs without a basis")
        if basis is not None:
            check_name(entry["basis"])
            _check_blobs(f"{owner}, its basis", basis, {"record", "tensors"})
        _check_entry(owner, entry, [entry["basis"]])
    return [Version(Entry(**version["entry"]), version["basis"]) for version in given]


def _check_blobs(owner: str, blobs: dict[str, str], needed: set[str]) -> None:
    if missing := needed - set(blobs):
        raise CovNormError(f"{owner}: the blobs {', '.join(sorted(missing))} are missing")
    for part, blob in blobs.items():
        _check_blob(blob, "json" if part in RECORDS else "safetensors")


def _check_blob(blob: str, ending: str) -> None:
    if not isinstance(blob, str) or not (match := BLOB.fullmatch(blob)) or match[2] != ending:
        raise CovNormError(f"{blob!r} is not the name of a .{ending} blob")
