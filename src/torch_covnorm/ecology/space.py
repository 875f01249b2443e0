"""What takes space in an ecology: what is served, what is kept for later, work and cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..data.cache import cached_files
from ..records import disk_bytes
from .store import Ecology

SERVED = ("record", "tensors")
# The other parts of a domain, by what they are for; earlier versions come in addition.
KINDS = {
    "trained.record": "trained",
    "trained.tensors": "trained",
    "moments": "moments",
    "examples": "examples",
    "details": "details",
}


@dataclass(frozen=True)
class Space:
    """The bytes that an ecology takes, without the backbone. A blob counts once.

    served: domains and bases as they are now, which is all that a device needs.
    kept: {"trained", "moments", "examples", "details", "versions"}: for joins, reports, rollbacks.
    kept_of: the same for every domain, removed ones included. What domains share counts for each.
    work: unfinished work of `add` and `join`.
    cache: decoded images.
    """

    served: int
    kept: dict[str, int]
    kept_of: dict[str, dict[str, int]]
    work: int
    cache: int


def space(ecology: Ecology) -> Space:
    """Return the bytes that an ecology takes. Of all files, only the manifest is read."""
    domains, bases, earlier = ecology.domains, ecology.bases, ecology.versions
    sizes = ecology.blobs.sizes()
    owners = [*bases.values(), *(entry.blobs for entry in domains.values())]
    served = {blobs[part] for blobs in owners for part in SERVED}
    versions = {n: {b for v in found for b in v.blobs} for n, found in earlier.items()}
    kept_of = {}
    for name in {**domains, **earlier}:
        now = [domains[name].blobs] if name in domains else []
        kept_of[name] = _kept(now, versions.get(name, set()), served, sizes)
    return Space(
        served=sum(sizes.get(blob, 0) for blob in served),
        kept=_kept(owners, set().union(*versions.values()), served, sizes),
        kept_of=kept_of,
        work=disk_bytes((ecology.folder / "work").rglob("*")),
        cache=disk_bytes(cached_files(ecology.folder / "cache")),
    )


def _kept(
    owners: Iterable[Mapping[str, str]],
    versions: set[str],
    served: set[str],
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Return the bytes of what is not served, by kind; a version has what no other kind has."""
    blobs: dict[str, set[str]] = {kind: set() for kind in KINDS.values()}
    for parts in owners:
        for part, blob in parts.items():
            if part in KINDS:
                blobs[KINDS[part]].add(blob)
    counted = served.union(*blobs.values())
    blobs["versions"] = versions - counted
    return {kind: sum(sizes.get(blob, 0) for blob in found) for kind, found in blobs.items()}
