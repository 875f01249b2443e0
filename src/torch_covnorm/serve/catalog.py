"""The domains of the store and their versions, kept up to date while the store changes."""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from ..data.image_files import MIN_SIDE
from ..data.images import FITS, InputShape
from ..ecology import Ecology
from ..ecology.manifest import Entry
from ..ecology.prediction import check_preprocessing, input_shape
from ..errors import CovNormError, choices
from ..network.domain import NAME
from ..records import blame
from .errors import RequestError, broken_domain, without_paths

LARGEST = 1024  # pixels on a side of an input
Bases = dict[str, dict[str, str]]


def version_of(entry: Entry, bases: Bases) -> str:
    """Return a hash that changes whenever the domain's predictions may, its basis included."""
    return _hash(entry.blobs["record"], entry.blobs["tensors"], *(_basis(entry, bases) or ()))


def _basis(entry: Entry, bases: Bases) -> tuple[str, str] | None:
    """Return the name of a domain's basis and its tensors' blob, which is its version."""
    if entry.basis is None:
        return None
    return entry.basis, bases.get(entry.basis, {}).get("tensors", "")


def _hash(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def check_servable(preprocessing: Any, name: str) -> dict[str, Any]:
    """Return a domain's preprocessing if it can be served.

    It may come from a forged record, so it is checked before it can harm other domains.
    """
    preprocessing = check_preprocessing(preprocessing, name)
    size, fit, mean, std = (preprocessing[key] for key in ("size", "fit", "mean", "std"))
    good = type(size) is int and MIN_SIDE <= size <= LARGEST and fit in FITS
    good = good and all(isinstance(values, list) and len(values) == 3 for values in (mean, std))
    good = good and all(type(v) in (int, float) and math.isfinite(v) for v in (*mean, *std))
    if not good or not all(value > 0 for value in std):
        raise CovNormError(
            f"domain {name!r}: invalid preprocessing {preprocessing!r}. It needs a size of "
            f"{MIN_SIDE} to {LARGEST} pixels, three means, three standard deviations above 0 and a "
            f"fit of {' or '.join(FITS)}."
        )
    return preprocessing


@dataclass(frozen=True)
class ServedDomain:
    """One version of a domain: enough to decode its images and to see when it has changed."""

    name: str
    version: str
    statistics: str  # version of what `auto` compares images with
    basis: tuple[str, str] | None  # name and version of its shared basis
    shape: InputShape
    bytes: int  # in memory, estimated
    classes: list[str] | None


class Catalog:
    """The domains of the store. Every access costs one stat of the manifest; changes are reread.

    If the manifest is damaged or missing, the last known state stays.
    """

    def __init__(self, ecology: Ecology) -> None:
        self.ecology = ecology
        self._stamp: object = None
        self._entries: dict[str, Entry] = {}
        self._versions: dict[str, str] = {}
        self._bases: Bases = {}
        self._served: dict[str, ServedDomain] = {}

    def entries(self) -> dict[str, Entry]:
        """Return the manifest's entry of every domain."""
        self._refresh()
        return self._entries

    def versions(self) -> dict[str, str]:
        """Return {name: version}; a new object whenever the store has changed."""
        self._refresh()
        return self._versions

    def find(self, name: str) -> ServedDomain:
        """Return a domain that can be served, or raise 404 or 409."""
        entry = self.find_entry(name)
        if name not in self._served:
            try:
                self._served[name] = self._read(name, entry)
            except CovNormError as error:
                why = without_paths(str(error), self.ecology.folder)
                raise broken_domain(name, why) from None
        return self._served[name]

    def servable(self) -> dict[str, ServedDomain]:
        """Return every domain that can be served."""
        served = {}
        for name in self.entries():
            with contextlib.suppress(RequestError):
                served[name] = self.find(name)
        return served

    def find_entry(self, name: str) -> Entry:
        """Return the manifest's entry of a domain, whose files may be broken, or raise 404."""
        self._refresh()
        if name not in self._entries:
            if NAME.fullmatch(name):
                known = sorted(self._entries)[:50]
                hint = choices(name, known) if known else "the store has no domains yet"
            else:
                name, hint = name[:64], "not a valid domain name"
            raise RequestError("unknown_domain", f"unknown domain {name!r}: {hint}")
        return self._entries[name]

    def _refresh(self) -> None:
        with contextlib.suppress(CovNormError):
            stamp = self.ecology.stamp
            if stamp == self._stamp:
                return
            entries, bases = self.ecology.domains, self.ecology.bases
            versions = {name: version_of(entry, bases) for name, entry in entries.items()}
            self._served = {
                name: served
                for name, served in self._served.items()
                if entries.get(name) == self._entries[name] and versions[name] == served.version
            }
            self._entries, self._bases, self._versions = entries, bases, versions
            self._stamp = stamp

    def _read(self, name: str, entry: Entry) -> ServedDomain:
        record = self.ecology.record(name)
        with blame(self.ecology.blobs.path(entry.blobs["record"])):
            preprocessing = check_servable(record["preprocessing"], name)
            classes = record["classes"]
        version, shape = self._versions[name], input_shape(preprocessing)
        statistics = _hash(version, *(entry.blobs.get(p, "") for p in ("moments", "examples")))
        basis = _basis(entry, self._bases)
        return ServedDomain(name, version, statistics, basis, shape, 4 * entry.total, classes)
