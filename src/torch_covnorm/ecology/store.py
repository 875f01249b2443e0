"""The ecology: a folder with one backbone, many domains, and the bases that they share.

``blobs/`` holds files named by their content. ``ecology.json``, the manifest, names those in use.
A change writes its blobs first and replaces the manifest last, under a lock. Readers, and whoever
comes after kill −9, see the store either before or after a change. See README.md in this folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..backbones.weights import Matched
from ..errors import CovNormError, choices
from ..network import basis as basis_files
from ..network import files
from ..network.domain import Domain, check_name
from ..network.network import MultiDomainNetwork
from ..records import blame
from ..stats.moments import Moments
from . import versions
from .backbone import describe, rebuild
from .blobs import Blobs
from .code import approve
from .manifest import KEEP, MANIFEST, Entry, Manifest, Version
from .work import locked

DETAILS = "torch-covnorm details"
T = TypeVar("T")


@dataclass(frozen=True)
class Details:
    """What the store keeps about a domain beside the domain itself.

    facts: "method", "settings", "source", "results" and "history" as plain JSON; `covnorm show`
        prints them. "method" and results.accuracy.final are required.
    moments: {site: moments of A's input}, which joining needs.
    trained: the domain with its full A's, before compression, which joining starts from.
    examples: {key: PNG} of a few test images, for the report.
    keep_rest: parts that are None here stay as they are in the store; otherwise they are dropped.
    """

    facts: dict[str, Any]
    moments: Mapping[str, Moments] | None = None
    trained: Domain | None = None
    examples: Mapping[str, bytes] | None = None
    keep_rest: bool = False


class Ecology:
    """A store of domains for one backbone. Opening it reads one file; domains load on request.

    ``Ecology.create("house")``, then ``Ecology("house")``. Any number of processes may read and
    write at the same time.
    """

    def __init__(self, folder: str | os.PathLike[str], trust_code: bool = False) -> None:
        """Open an ecology.

        Args:
            trust_code: run a backbone that is stored as code although it was not approved on this
                machine by this user. Such code can do anything: read it first.
        """
        self.folder, self.trust_code = Path(folder), trust_code
        self.matched: Matched | None = None
        self.file = self.folder / MANIFEST
        self.blobs = Blobs(self.folder / "blobs")
        self._cached: tuple[object, Manifest] | None = None
        if not self.file.is_file():
            create = f"Correct the path, or create one: covnorm init {self.folder}"
            remedy = "Restore it from a copy." if self.blobs.names() else create
            raise CovNormError(f"{self.file}: no ecology found. {remedy}")
        self._manifest()

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        backbone: str | os.PathLike[str] | nn.Module = "efficientnet-lite0",
        weights: str | os.PathLike[str] | None = None,
        *,
        keep: int = KEEP,
    ) -> Ecology:
        """Create an ecology in a folder and open it.

        A backbone given by name is stored as a name. Weights from a file are copied into the
        ecology; `matched` then says how its tensors became those of the network. Of
        ``file.py:function`` the source and the weights are stored, and the code is approved for
        this user. A module is stored as a fingerprint only: pass it to `network` again.

        keep: the number of earlier versions to keep of every domain, for `rollback`.
        """
        path = Path(folder)
        _check_keep(keep)
        described = describe(backbone, weights)
        with blame(path):
            path.mkdir(parents=True, exist_ok=True)
        with locked(path / ".lock"):
            if (path / MANIFEST).exists():
                raise CovNormError(f"{path}: is an ecology already: use it, or give another folder")
            blobs = Blobs(path / "blobs")
            existing = blobs.names()
            manifest = Manifest(described.write(blobs), keep=keep)
            if existing - manifest.references():  # more than a killed `create` leaves
                raise CovNormError(
                    f"{path / MANIFEST}: is missing, but the blobs of an ecology are there. "
                    "Restore it from a copy."
                )
            if described.source is not None:
                approve(*described.source)
            manifest.write(path / MANIFEST)
        ecology = cls(path)
        ecology.matched = described.matched
        return ecology

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    @property
    def backbone(self) -> dict[str, Any]:
        """The backbone's name, class, fingerprint, parameters, bytes and preprocessing."""
        return dict(self._manifest().backbone)

    @property
    def domains(self) -> dict[str, Entry]:
        """Every domain by name, as of now. No tensor is read."""
        return dict(self._manifest().domains)

    @property
    def stamp(self) -> object:
        """A value that differs whenever the store has changed; costs one `stat`."""
        return self._current()[0]

    @property
    def bases(self) -> dict[str, dict[str, str]]:
        """The blobs of every shared basis by name."""
        return dict(self._manifest().bases)

    @property
    def keep(self) -> int:
        """The number of earlier versions that are kept of every domain."""
        return self._manifest().keep

    @property
    def versions(self) -> dict[str, list[Version]]:
        """Earlier versions by domain, the last one first; removed domains are among them."""
        return dict(self._manifest().earlier)

    def entry(self, name: str) -> Entry:
        """Return a domain's entry in the manifest; an unknown name is an error."""
        return self._known("domain", name, self._manifest().domains)

    def network(self, backbone: nn.Module | None = None) -> MultiDomainNetwork:
        """Return the backbone as a `MultiDomainNetwork` without domains, fingerprint checked."""
        return rebuild(self._manifest().backbone, self.blobs, backbone, self.trust_code)

    def load(self, net: MultiDomainNetwork, name: str, trained: bool = False) -> Domain:
        """Add a domain, and the basis that it shares, to the network.

        With `trained`, load it with its full A's. On an error the network stays as it was.
        """
        if name in net.domains:
            raise CovNormError(f"domain {name!r} is already in the network: remove it first")
        bases = set(net.bases)

        def read(entry: Entry) -> Domain:
            try:
                return self._domain(net, name, entry, "trained." if trained else "")
            except CovNormError:
                for basis in set(net.bases) - bases:
                    del net.bases[basis]
                raise

        net.domains[name] = domain = self._read(name, read)
        return domain

    def _domain(self, net: MultiDomainNetwork, name: str, entry: Entry, prefix: str) -> Domain:
        if f"{prefix}record" not in entry.blobs:
            raise CovNormError(
                f"domain {name!r}: method {entry.method!r} keeps no trained A: load it without "
                "trained=True"
            )
        record_blob, tensor_blob = (entry.blobs[prefix + part] for part in ("record", "tensors"))
        paths = self.blobs.path(record_blob), self.blobs.path(tensor_blob)
        record = self.blobs.read_record(record_blob, files.FORMAT)
        with blame(paths[0]):
            basis = record["basis"] and record["basis"]["name"]
            if basis is not None and basis not in net.bases:
                self.load_basis(net, basis)
            files.check_record(record, net, None)
        tensors = self.blobs.read_tensors(tensor_blob)
        return files.unpacked(net, record, tensors, name, None, *paths)

    def load_basis(self, net: MultiDomainNetwork, name: str) -> None:
        """Add a shared basis to the network."""
        blobs = self._known("basis", name, self.bases)
        record = self.blobs.read_record(blobs["record"], basis_files.FORMAT)
        tensors: dict[str, Tensor] = {}
        for part in sorted(set(blobs) - {"record"}):
            tensors |= self.blobs.read_tensors(blobs[part])
        with blame(self.blobs.path(blobs["record"])):
            net.bases[name] = basis_files.unpacked(net, record, tensors)

    def details(self, name: str) -> dict[str, Any]:
        """Return a domain's method, settings, source, results and history."""
        return self._read(name, lambda e: self.blobs.read_record(e.blobs["details"], DETAILS))

    def record(self, name: str) -> dict[str, Any]:
        """Return a domain's record: classes, preprocessing, adapters by site."""
        return self._read(name, lambda e: self.blobs.read_record(e.blobs["record"], files.FORMAT))

    def moments(self, name: str) -> dict[str, Moments]:
        """Return {site: moments of A's input}; empty if the method collects none."""
        return self._read(name, lambda e: _optional(self.blobs.read_moments, e, "moments"))

    def examples(self, name: str) -> dict[str, bytes]:
        """Return a few test images of a domain as {key: PNG}."""
        tensors = self._read(name, lambda e: _optional(self.blobs.read_tensors, e, "examples"))
        return {key: value.numpy().tobytes() for key, value in tensors.items()}

    def history(self, name: str) -> list[dict[str, Any]]:
        """Return the versions of a domain, the current one first unless it was removed.

        Each has its "version" (0 is the current one, `rollback` takes the others), "current",
        "time" and "what" of its making, "method", "accuracy", "bytes" and "digest".
        """
        manifest = self._manifest()
        earlier = manifest.earlier.get(name, [])
        if name not in manifest.domains and not earlier:
            self._known("domain", name, {**manifest.earlier, **manifest.domains})
        now = [manifest.current(name)] if name in manifest.domains else []
        found = []
        for i, version in enumerate([*now, *earlier], 1 - len(now)):
            event = (self.events(version.entry) or [{}])[-1]
            found.append(
                {
                    "version": i,
                    "current": i == 0,
                    "time": event.get("time"),
                    "what": event.get("what"),
                    "method": version.entry.method,
                    "accuracy": version.entry.accuracy,
                    "bytes": version.entry.bytes,
                    "digest": version.digest,
                }
            )
        return found

    def events(self, entry: Entry) -> list[dict[str, Any]]:
        """Return what was done to a domain until this entry; [] if its details are damaged."""
        found: object = None
        with contextlib.suppress(CovNormError):
            found = self.blobs.read_record(entry.blobs["details"], DETAILS).get("history")
        return [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        net: MultiDomainNetwork,
        details: Mapping[str, Details],
        dtype: torch.dtype = torch.float32,
        replace: bool = False,
        before: Mapping[str, Entry] | None = None,
    ) -> None:
        """Store domains of the network with their details and shared bases, all or nothing.

        Args:
            details: {domain: its details}.
            dtype: the precision of the stored tensors: float32, float16 or int8.
            replace: allow domains that are in the store already.
            before: entries that the domains were made from. If another process has changed one of
                them since, nothing is stored.
        """
        with self._changing() as manifest:
            for name, entry in (before or {}).items():
                if manifest.domains.get(name) != entry:
                    raise CovNormError(
                        f"{self.folder}: another process has changed domain {name!r} meanwhile: "
                        "run the same command again"
                    )
            if not replace:
                for name in details:
                    self.check_new(name, manifest)
            for basis in {b for n in details if (b := net.domain(n).basis) is not None}:
                fingerprint, seen = self._basis_state(manifest, basis)
                users = [n for n, entry in manifest.domains.items() if entry.basis == basis]
                if fingerprint != net.basis(basis).fingerprint:
                    if others := [n for n in users if n not in details]:
                        raise CovNormError(
                            f"{self.folder}: basis {basis!r} is shared by {', '.join(others[:4])}, "
                            "which this change leaves out: join them together, or choose another "
                            "--basis"
                        )
                elif seen > net.basis(basis).seen:
                    continue  # the same factors; others have joined them in the store since
                manifest.bases[basis] = self._written_basis(net, basis)
            for name, detail in details.items():
                old = manifest.domains.get(name) if detail.keep_rest else None
                manifest.domains[name] = self._written(net, name, detail, dtype, old)

    def remove(self, names: Sequence[str], purge: bool = False) -> None:
        """Remove domains, and the bases that no domain uses any more.

        They can be restored with `rollback`, unless `purge` deletes their versions too.
        """
        purged = set(names) if purge else set()
        with self._changing(purged=purged) as manifest:
            for name in dict.fromkeys(names):
                known = {**(manifest.earlier if purge else {}), **manifest.domains}
                self._known("domain", name, known)
                manifest.domains.pop(name, None)
                if purge:
                    manifest.earlier.pop(name, None)

    def rollback(self, names: Sequence[str], to: str | int | None = None) -> dict[str, str]:
        """Make an earlier version of each domain current, in one step; return {name: its digest}.

        The versions that they replace are kept, so `rollback` can be undone. Domains that share a
        basis which has changed since go back together.

        Args:
            to: the number of the version in `history`, or the start of its digest. By default the
                version that was current before, or at the removal of the domain.
        """
        if to is not None and len(set(names)) > 1:
            raise CovNormError(f"version {to}: name one domain, or leave the version out")
        with self._changing() as manifest:
            with blame(self.folder):
                wanted = {name: versions.find(manifest, name, to) for name in names}
                versions.restore_(manifest, wanted)
            for version in wanted.values():
                self._check_version(version)
        return {name: version.digest for name, version in wanted.items()}

    def set_keep(self, keep: int) -> None:
        """Set how many earlier versions of every domain are kept; delete those beyond."""
        _check_keep(keep)
        with self._changing(keep=keep):
            pass

    def drop_versions(self, keep: int | None = None, dry_run: bool = False) -> dict[str, int]:
        """Delete versions of removed domains, and all but the last `keep` of the others, if given.

        Also deletes blobs that killed processes have left. Returns the bytes of both: "versions"
        and "leftovers". With `dry_run`, nothing is deleted.
        """
        if keep is not None:
            _check_keep(keep)
        unchanged = contextlib.nullcontext(self._manifest().copy())
        with unchanged if dry_run else self._changing() as manifest:
            sizes, used = self.blobs.sizes(), manifest.references()
            versions.trim_(manifest, manifest.keep if keep is None else keep, removed=keep or 0)
            dropped = used - manifest.references()
            freed = {"versions": dropped, "leftovers": set(sizes) - used}
            return {kind: sum(sizes.get(b, 0) for b in blobs) for kind, blobs in freed.items()}

    def check_new(self, name: str, manifest: Manifest | None = None) -> None:
        """Refuse a name that is invalid or taken."""
        if check_name(name) in (manifest or self._manifest()).domains:
            raise CovNormError(
                f"{self.folder}: domain {name!r} already exists: remove it (covnorm remove), "
                "replace it (--replace), or choose another name"
            )

    def workplace(self, name: str) -> Path:
        """Return the folder for unfinished work on a domain."""
        return self.folder / "work" / "domains" / check_name(name)

    # ── internals ────────────────────────────────────────────────────────────────────────────

    def _current(self) -> tuple[object, Manifest]:
        """Return the manifest as it is on disk, and its stamp; read it only if it has changed."""
        with blame(self.file):
            stat = self.file.stat()
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        cached = self._cached  # another thread may replace it at any moment
        if cached is None or cached[0] != stamp:
            cached = self._cached = stamp, Manifest.read(self.file)
        return cached

    def _manifest(self) -> Manifest:
        return self._current()[1]

    def _known(self, what: str, name: str, known: Mapping[str, T]) -> T:
        if name not in known:
            raise CovNormError(f"{self.folder}: unknown {what} {name!r}: {choices(name, known)}")
        return known[name]

    def _read(self, name: str, read: Callable[[Entry], T]) -> T:
        """Read blobs of a domain; if the store changes meanwhile, read them once more."""
        while True:
            manifest = self._manifest()
            try:
                return read(self.entry(name))
            except CovNormError:
                if self._manifest() is manifest:
                    raise

    @contextlib.contextmanager
    def _changing(self, keep: int | None = None, purged: Container[str] = ()) -> Iterator[Manifest]:
        """Yield a copy of the manifest to change; it replaces the manifest if nothing fails.

        What the change replaces or removes stays as an earlier version, unless it is `purged`.
        """
        with locked(self.folder / ".lock"):
            self._cached = None  # read the file again: nobody else writes while the lock is held
            stored = self._manifest()
            manifest = stored.copy(keep)
            try:
                yield manifest
                versions.keep_replaced_(manifest, stored, purged, self._is_intact)
                used = {entry.basis for entry in manifest.domains.values()}
                for unused in set(manifest.bases) - used:
                    del manifest.bases[unused]
                manifest.write(self.file)
            finally:  # removes the blobs of a failed change, or those of dropped versions
                self.blobs.sweep(self._manifest().references())

    def _check_version(self, version: Version) -> None:
        """Check that all blobs of a version are as they were written."""
        for blob in version.blobs:
            self.blobs.read(blob)

    def _is_intact(self, version: Version) -> bool:
        with contextlib.suppress(CovNormError):
            self._check_version(version)
            return True
        return False

    def _written_basis(self, net: MultiDomainNetwork, name: str) -> dict[str, str]:
        """Write a basis: its factors apart from its moments, which only joining needs."""
        record, factors, moments = basis_files.packed(net, net.basis(name))
        parts = {"tensors": factors, "moments": moments}
        blobs = {part: self.blobs.write_tensors(found) for part, found in parts.items() if found}
        return {"record": self.blobs.write_record(basis_files.FORMAT, record), **blobs}

    def _basis_state(self, manifest: Manifest, basis: str) -> tuple[str | None, int]:
        """Return a stored basis' fingerprint and the rows of features it was made from.

        None and -1 if they cannot be read.
        """
        fingerprint, seen, blobs = None, -1, manifest.bases.get(basis, {})
        with contextlib.suppress(CovNormError, KeyError):
            fingerprint = self.blobs.read_record(blobs["record"], basis_files.FORMAT)["fingerprint"]
            tensors = self.blobs.read_tensors(blobs["moments"]) if "moments" in blobs else {}
            seen = basis_files.rows_seen(tensors)
        return fingerprint, seen

    def _written(
        self,
        net: MultiDomainNetwork,
        name: str,
        details: Details,
        dtype: torch.dtype,
        old: Entry | None,
    ) -> Entry:
        """Write a domain's blobs and return its entry; parts of `old` that are not given stay."""
        domain = net.domain(name)
        record, tensors = files.packed(net, domain, dtype)
        blobs = {
            **(old.blobs if old else {}),
            "record": self.blobs.write_record(files.FORMAT, record),
            "tensors": self.blobs.write_tensors(tensors),
            "details": self.blobs.write_record(DETAILS, details.facts),
        }
        if details.trained is not None:
            record, tensors = files.packed(net, details.trained, torch.float32)
            blobs["trained.record"] = self.blobs.write_record(files.FORMAT, record)
            blobs["trained.tensors"] = self.blobs.write_tensors(tensors)
        if details.moments:
            blobs["moments"] = self.blobs.write_moments(details.moments)
        if details.examples:
            images = {key: bytearray(png) for key, png in details.examples.items()}
            tensors = {k: torch.frombuffer(png, dtype=torch.uint8) for k, png in images.items()}
            blobs["examples"] = self.blobs.write_tensors(tensors)
        count = domain.num_parameters()
        return Entry(
            method=details.facts["method"],
            classes=None if domain.classes is None else len(domain.classes),
            accuracy=details.facts["results"]["accuracy"]["final"],
            parameters=count["adapter"],
            total=count["total"],
            bytes=sum(self.blobs.size(blobs[part]) for part in ("record", "tensors")),
            basis=domain.basis,
            blobs=blobs,
        )


def _optional(read: Callable[[str], dict[str, T]], entry: Entry, part: str) -> dict[str, T]:
    return read(entry.blobs[part]) if part in entry.blobs else {}


def _check_keep(keep: object) -> None:
    if type(keep) is not int or keep < 0:
        raise CovNormError(f"keep={keep!r}: give the number of versions to keep, 0 for none")
