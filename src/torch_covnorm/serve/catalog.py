"""What the store has now: every domain with its version, followed as it changes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ..ecology import Ecology
from ..errors import CovNormError, choices
from ..prediction import check_preprocessing
from .refusals import broken, unknown


def version_of(ecology: Ecology, name: str) -> str:
    """Changes whenever what is served of a domain changes, its shared basis included."""
    entry = ecology.entry(name)
    blobs = [entry.blobs["record"], entry.blobs["tensors"]]
    return _hashed(blobs + _basis_blobs(ecology, entry.basis))


def _basis_blobs(ecology: Ecology, basis: str | None) -> list[str]:
    return [] if basis is None else [ecology.bases.get(basis, {}).get("tensors", "")]


def _hashed(parts: list[str]) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Listed:
    """A domain as it is listed: enough to decode its images and to know when it changed."""

    name: str
    version: str
    basis: tuple[str, str] | None
    size: int  # side of its inputs
    fit: str
    bytes: int  # in memory, about
    facts: dict[str, Any]


class Catalog:
    """The store's list. Every look costs one stat of the manifest; what changed is read again."""

    def __init__(self, ecology: Ecology) -> None:
        self.ecology = ecology
        self._known: dict[str, Listed] = {}

    def names(self) -> list[str]:
        """Of all domains."""
        return sorted(self.ecology.domains)

    def versions(self) -> dict[str, str]:
        """{name: version} of all domains, to see what changed."""
        return {name: version_of(self.ecology, name) for name in self.ecology.domains}

    def find(self, name: str) -> Listed:
        """A domain, or a refusal that says which there are."""
        entries = self.ecology.domains
        if name not in entries:
            self._known.pop(name, None)
            known = choices(name, sorted(entries)[:50]) if entries else "there are none yet"
            raise unknown(name, known)
        try:
            version = version_of(self.ecology, name)
            found = self._known.get(name)
            if found is None or found.version != version:
                found = self._known[name] = self._read(name, version)
        except CovNormError as error:
            raise broken(name, str(error)) from None
        return found

    def _read(self, name: str, version: str) -> Listed:
        entry, record = self.ecology.entry(name), self.ecology.record(name)
        how = check_preprocessing(record["preprocessing"], name)
        basis = entry.basis and (entry.basis, _hashed(_basis_blobs(self.ecology, entry.basis)))
        facts = {
            "domain": name,
            "method": entry.method,
            "classes": record["classes"],
            "accuracy": entry.accuracy,
            "parameters": entry.parameters,
            "bytes": entry.bytes,
            "basis": entry.basis,
            "size": how["size"],
        }
        return Listed(
            name, version, basis or None, int(how["size"]), how["fit"], 4 * entry.total, facts
        )
