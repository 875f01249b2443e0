"""Earlier versions of domains: which are kept, which one is meant, and how one becomes current.

Functions of a manifest that is about to be written; the store calls them under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from ..errors import CovNormError, choices
from .manifest import Manifest, Version

SHORTEST = 4  # characters of a digest; fewer digits are the number of a version


def keep_replaced_(
    manifest: Manifest,
    before: Manifest,
    purged: Container[str] = (),
    is_intact: Callable[[Version], bool] = lambda _: True,
) -> None:
    """Keep what a change has replaced or removed, as many versions as the manifest says.

    A domain's earlier versions differ from each other and from the current one. A damaged version
    could never be restored, so it is not kept.
    """
    for name in {**before.domains, **manifest.domains}:
        if manifest.domains.get(name) is before.domains.get(name):
            continue
        kept = manifest.earlier.get(name, [])
        if name in before.domains and name not in purged and manifest.keep:
            replaced = before.current(name)
            if is_intact(replaced):
                kept = [replaced, *(v for v in kept if v.digest != replaced.digest)]
        current = manifest.current(name).digest if name in manifest.domains else None
        manifest.earlier[name] = [version for version in kept if version.digest != current]
    trim_(manifest, manifest.keep)


def trim_(manifest: Manifest, keep: int, removed: int | None = None) -> None:
    """Keep at most so many versions of every domain, and `removed` of those that were removed."""
    for name, versions in list(manifest.earlier.items()):
        most = keep if removed is None or name in manifest.domains else removed
        if kept := versions[:most]:
            manifest.earlier[name] = kept
        else:
            del manifest.earlier[name]


def find(manifest: Manifest, name: str, to: str | int | None = None) -> Version:
    """Return an earlier version of a domain: by number, by the start of its digest, or the last.

    Number 1 is the version that was current before the present one, or before the removal.
    """
    versions = manifest.earlier.get(name, [])
    if not versions and name not in manifest.domains:
        known = {*manifest.domains, *manifest.earlier}
        raise CovNormError(f"unknown domain {name!r}: {choices(name, known)}")
    if not versions:
        raise CovNormError(
            f"domain {name!r} has no earlier version: one is kept when a domain is replaced or "
            "removed"
        )
    text = "1" if to is None else str(to).lower()
    if text.isdecimal() and len(text) < SHORTEST:
        found = versions[int(text) - 1 : int(text)] if int(text) else []
    else:
        found = [v for v in versions if v.digest.startswith(text) and len(text) >= SHORTEST]
    if len(found) != 1:
        problem = "several versions start with it" if found else "no such earlier version"
        raise CovNormError(
            f"domain {name!r}, version {text}: {problem}: give a number from 1 to {len(versions)} "
            f"or a digest (covnorm history {name})"
        )
    return found[0]


def restore_(manifest: Manifest, wanted: Mapping[str, Version]) -> None:
    """Make earlier versions current, together with the bases that they shared.

    A basis that has changed since is restored only if all domains that share it now are restored.
    """
    for name, version in wanted.items():
        manifest.domains[name] = version.entry
    for name, version in wanted.items():
        basis, blobs = version.entry.basis, version.basis
        if basis is None or blobs is None:
            continue
        sharers = [n for n, entry in manifest.domains.items() if entry.basis == basis]
        others = [n for n in sharers if n not in wanted]
        held = manifest.bases.get(basis, blobs)
        if others and held["tensors"] != blobs["tensors"]:
            raise CovNormError(
                f"domain {name!r}: this version needs basis {basis!r} as it was then, which has "
                f"changed since and is shared by {', '.join(others[:4])}: roll back all of them in "
                f"one command (covnorm rollback {' '.join([*wanted, *others])})"
            )
        if any(_factors(wanted[n]) != blobs["tensors"] for n in sharers if n in wanted):
            raise CovNormError(
                f"{', '.join(sharers[:4])}: these versions shared different states of basis "
                f"{basis!r}: roll back to versions of the same time"
            )
        manifest.bases[basis] = held if held["tensors"] == blobs["tensors"] else blobs


def _factors(version: Version) -> str | None:
    return None if version.basis is None else version.basis["tensors"]
