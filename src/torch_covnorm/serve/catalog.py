"""What the store has now: every domain with its version, followed as it changes."""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from ..data.image_files import MIN_SIDE
from ..data.images import FITS
from ..ecology import Ecology
from ..ecology.manifest import Entry
from ..ecology.prediction import check_preprocessing
from ..errors import CovNormError, choices
from ..network.domain import NAME
from ..records import blame
from .refusals import broken, unknown

LARGEST = 1024  # pixels on a side of an input
Bases = dict[str, dict[str, str]]


def version_of(ecology: Ecology, name: str) -> str:
    """Changes whenever what is served of a domain changes, its shared basis included."""
    return _version(ecology.entry(name), ecology.bases)


def _version(entry: Entry, bases: Bases) -> str:
    blobs = [entry.blobs["record"], entry.blobs["tensors"]]
    return _hashed(blobs + _basis_blobs(entry, bases))


def _basis_blobs(entry: Entry, bases: Bases) -> list[str]:
    return [] if entry.basis is None else [bases.get(entry.basis, {}).get("tensors", "")]


def _hashed(parts: list[str]) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def check_servable(how: Any, name: str) -> dict[str, Any]:
    """What a domain says of its images, checked: a forged record must not cost the others."""
    how = check_preprocessing(how, name)
    side, fit = how["size"], how["fit"]
    good = type(side) is int and MIN_SIDE <= side <= LARGEST and fit in FITS
    for key in ("mean", "std"):
        good = good and isinstance(how[key], list) and len(how[key]) == 3
        good = good and all(_is_number(value) for value in how[key])
    if not good or not all(value > 0 for value in how["std"]):
        raise CovNormError(
            f"domain {name!r}: its preprocessing {how!r} has no side of {MIN_SIDE} to {LARGEST} "
            f"pixels, three means, three deviations above 0 and a fit of {' or '.join(FITS)}"
        )
    return how


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Listed:
    """A domain as it is listed: enough to decode its images and to know when it changed."""

    name: str
    version: str
    statistics: str  # the version of what `auto` knows it by
    basis: tuple[str, str] | None
    size: int  # side of its inputs
    fit: str
    bytes: int  # in memory, about
    facts: dict[str, Any]


class Catalog:
    """The store's list. Every look costs one stat of the manifest; what changed is read again.

    Should the manifest be damaged or gone, what was known last stays.
    """

    def __init__(self, ecology: Ecology) -> None:
        self.ecology = ecology
        self._stamp: object = None
        self._entries: dict[str, Entry] = {}
        self._versions: dict[str, str] = {}
        self._bases: Bases = {}
        self._listed: dict[str, Listed] = {}

    def entries(self) -> dict[str, Entry]:
        """Every domain by name, as the manifest has it."""
        self._look()
        return self._entries

    def versions(self) -> dict[str, str]:
        """{name: version} of all domains; another object whenever the store has changed."""
        self._look()
        return self._versions

    def find(self, name: str) -> Listed:
        """A domain, or a refusal that says which there are."""
        self.find_entry(name)
        found = self._listed.get(name)
        if found is None:
            try:
                found = self._listed[name] = self._read(name)
            except CovNormError as error:
                raise broken(name, self.plain(str(error))) from None
        return found

    def find_entry(self, name: str) -> Entry:
        """A domain as the manifest has it; its own files may be broken."""
        self._look()
        if name not in self._entries:
            if not NAME.fullmatch(name):
                raise unknown(name[:64], "not a name that a domain can have")
            known = sorted(self._entries)[:50]
            raise unknown(name, choices(name, known) if known else "there are none yet")
        return self._entries[name]

    def plain(self, text: str) -> str:
        """A message without the path of the store, which is nobody's business."""
        folder = str(self.ecology.folder)
        return text.replace(f"{folder}/", "").replace(f"{folder}: ", "")

    def _look(self) -> None:
        with contextlib.suppress(CovNormError):
            stamp = self.ecology.stamp
            if stamp == self._stamp:
                return
            entries, bases = self.ecology.domains, self.ecology.bases
            versions = {name: _version(entry, bases) for name, entry in entries.items()}
            same = {n for n, entry in entries.items() if entry == self._entries.get(n)}
            same = {n for n in same if versions[n] == self._versions.get(n)}
            self._listed = {n: listed for n, listed in self._listed.items() if n in same}
            self._entries, self._bases, self._versions = entries, bases, versions
            self._stamp = stamp

    def _read(self, name: str) -> Listed:
        entry, record = self._entries[name], self.ecology.record(name)
        with blame(self.ecology.blobs.path(entry.blobs["record"])):
            how, classes = check_servable(record["preprocessing"], name), record["classes"]
        version = self._versions[name]
        basis = entry.basis and (entry.basis, _hashed(_basis_blobs(entry, self._bases)))
        kept = [entry.blobs.get(part, "") for part in ("moments", "examples")]
        facts = {
            "domain": name,
            "method": entry.method,
            "classes": classes,
            "accuracy": entry.accuracy,
            "parameters": entry.parameters,
            "bytes": entry.bytes,
            "basis": entry.basis,
            "size": how["size"],
        }
        return Listed(
            name,
            version,
            _hashed([version, *kept]),
            basis or None,
            how["size"],
            how["fit"],
            4 * entry.total,
            facts,
        )
