"""The ecology: a folder with one backbone, many domains, and what they share.

``blobs/`` holds files named by their content; ``ecology.json``, the manifest, names those that
count. Blobs are written first and the manifest is replaced last, under a lock between processes: a
reader, and whoever comes after kill −9, finds the store before a change or behind it.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CovNormError, choices
from ..network import basis as basis_files
from ..network import files
from ..network.domain import Domain, check_name
from ..network.network import MultiDomainNetwork
from ..records import blame
from ..stats.moments import Moments
from . import moments as moment_files
from .backbone import describe, rebuild
from .blobs import Blobs
from .lock import locked
from .manifest import MANIFEST, Entry, read_manifest, references, write_manifest

DETAILS = "torch-covnorm details"


@dataclass(frozen=True)
class Details:
    """What is kept beside a domain: plain JSON, and what joining and reports need later.

    facts: "method", "settings", "source", "results" and "history", as `show` tells them.
    keep: what is not given here stays as the store has it.
    """

    facts: dict[str, Any]
    moments: Mapping[str, Moments] | None = None
    trained: Domain | None = None
    examples: Mapping[str, bytes] | None = None
    keep: bool = False


class Ecology:
    """A store of domains for one backbone. Opening it reads one file; domains load when asked for.

    ``Ecology.create("house")``, then ``Ecology("house")``. Any number of processes may read and
    write at once.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.file = self.folder / MANIFEST
        self.blobs = Blobs(self.folder / "blobs")
        self._seen: tuple[Any, dict[str, Any]] | None = None
        if not self.file.is_file():
            lost = self.blobs.names()
            remedy = "restore it from a copy" if lost else f"covnorm init {self.folder}"
            raise CovNormError(f"{self.file}: no ecology there: {remedy}")
        self._manifest()

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        backbone: str | os.PathLike[str] | nn.Module = "efficientnet-lite0",
        weights: str | os.PathLike[str] | None = None,
    ) -> Ecology:
        """Make a new one. A backbone given by name stays a name; weights from a file are kept in
        it; a module of the caller's is known by its fingerprint and passed to `network` again."""
        path, description = Path(folder), describe(backbone, weights)
        with blame(path):
            path.mkdir(parents=True, exist_ok=True)
        with locked(path / ".lock"):
            if (path / MANIFEST).exists():
                raise CovNormError(f"{path}: is an ecology already: use it, or give another folder")
            described, kept = description
            blobs = Blobs(path / "blobs")
            before = blobs.names()
            if kept is not None:
                tensors = {k: v.contiguous() for k, v in kept.state_dict().items()}
                described["weights"] = blobs.write_tensors(tensors)
            if before - {described["weights"]}:  # more than a killed `create` leaves
                raise CovNormError(
                    f"{path / MANIFEST}: is gone, but its blobs are there: restore it from a copy"
                )
            manifest = {"backbone": described, "domains": {}, "bases": {}}
            write_manifest(path / MANIFEST, manifest)
        return cls(path)

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    @property
    def backbone(self) -> dict[str, Any]:
        """Of the backbone: name, class, fingerprint, parameters, bytes, preprocessing."""
        return dict(self._manifest()["backbone"])

    @property
    def domains(self) -> dict[str, Entry]:
        """Every domain by name, as it is now; no tensor is read for it."""
        return {name: Entry(**entry) for name, entry in self._manifest()["domains"].items()}

    @property
    def stamp(self) -> object:
        """Another one whenever the store has changed; costs one look at a file's date."""
        self._manifest()
        assert self._seen is not None
        return self._seen[0]

    @property
    def bases(self) -> dict[str, dict[str, str]]:
        """The blobs of every shared basis by name."""
        return dict(self._manifest()["bases"])

    def entry(self, name: str) -> Entry:
        """One domain of the manifest; an unknown one is an error."""
        found = self._manifest()["domains"]
        if name not in found:
            raise CovNormError(f"{self.folder}: unknown domain {name!r}: {choices(name, found)}")
        return Entry(**found[name])

    def network(self, backbone: nn.Module | None = None) -> MultiDomainNetwork:
        """The backbone as a `MultiDomainNetwork` without domains, its fingerprint checked."""
        return rebuild(self._manifest()["backbone"], self.blobs, backbone)

    def load(self, net: MultiDomainNetwork, name: str, trained: bool = False) -> Domain:
        """Add a domain to the network, with the basis that it shares; `trained`: with full A's.

        On an error the network is as it was.
        """
        if name in net.domains:
            raise CovNormError(f"domain {name!r} is in the network already: remove it first")
        bases = dict(net.bases.items())

        def read(entry: Entry) -> Domain:
            try:
                return self._domain(net, name, entry, "trained." if trained else "")
            except CovNormError:
                for basis in set(net.bases) - set(bases):
                    del net.bases[basis]
                raise

        domain: Domain = self._reading(name, read)
        net.domains[name] = domain
        return domain

    def _domain(self, net: MultiDomainNetwork, name: str, entry: Entry, part: str) -> Domain:
        if f"{part}record" not in entry.blobs:
            raise CovNormError(f"domain {name!r}: no trained A is kept for {entry.method!r}")
        names = entry.blobs[f"{part}record"], entry.blobs[f"{part}tensors"]
        paths = [self.blobs.path(n) for n in names]
        record = self.blobs.read_record(names[0], files.FORMAT)
        with blame(paths[0]):
            basis = record["basis"] and record["basis"]["name"]
            if basis is not None and basis not in net.bases:
                self.load_basis(net, basis)
            files.check_record(record, net, None)
        tensors = self.blobs.read_tensors(names[1])
        return files.unpacked(net, record, tensors, name, None, *paths)

    def load_basis(self, net: MultiDomainNetwork, name: str) -> None:
        """Add a shared basis to the network."""
        bases = self.bases
        if name not in bases:
            raise CovNormError(f"{self.folder}: unknown basis {name!r}: {choices(name, bases)}")
        record = self.blobs.read_record(bases[name]["record"], basis_files.FORMAT)
        tensors: dict[str, Tensor] = {}
        for part in sorted(set(bases[name]) - {"record"}):
            tensors |= self.blobs.read_tensors(bases[name][part])
        with blame(self.blobs.path(bases[name]["record"])):
            net.bases[name] = basis_files.unpacked(net, record, tensors)

    def details(self, name: str) -> dict[str, Any]:
        """A domain's method, settings, source, results and history."""
        found: dict[str, Any] = self._reading(
            name, lambda entry: self.blobs.read_record(entry.blobs["details"], DETAILS)
        )
        return found

    def record(self, name: str) -> dict[str, Any]:
        """What the domain's files say of it: classes, preprocessing, adapters by site."""
        found: dict[str, Any] = self._reading(
            name, lambda entry: self.blobs.read_record(entry.blobs["record"], files.FORMAT)
        )
        return found

    def moments(self, name: str) -> dict[str, Moments]:
        """{site: moments of A's input}; empty for a method that collects none."""
        tensors = self._part(name, "moments")
        with blame(self.file):
            return moment_files.unpacked(tensors)

    def examples(self, name: str) -> dict[str, bytes]:
        """A few test images of a domain as PNG."""
        return {k: v.numpy().tobytes() for k, v in self._part(name, "examples").items()}

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        net: MultiDomainNetwork,
        details: Mapping[str, Details],
        dtype: torch.dtype = torch.float32,
        replace: bool = False,
        before: Mapping[str, Entry] | None = None,
    ) -> None:
        """Keep domains of the network with their details, and the bases that they share: all or
        nothing.

        `replace`: they may be there already. `before`: what they were made from; where another has
        changed one of these meanwhile, nothing is kept."""
        bases = {b for n in details if (b := net.domain(n).basis) is not None}
        with self._changing() as manifest:
            for name, entry in (before or {}).items():
                if manifest["domains"].get(name) != asdict(entry):
                    raise CovNormError(
                        f"{self.folder}: domain {name!r} was changed meanwhile: give the same "
                        "command again"
                    )
            for name in details:
                if not replace:
                    self.check_new(name, manifest)
            for basis in bases:
                if self._fingerprint(manifest, basis) != net.basis(basis).fingerprint:
                    self._check_users(manifest, basis, details)
                elif self._rows_behind(manifest, basis) > net.basis(basis).seen:
                    continue  # the same factors; others have joined them in the store since
                manifest["bases"][basis] = self._written_basis(net, basis)
            for name, kept in details.items():
                old = manifest["domains"].get(name, {}).get("blobs", {}) if kept.keep else {}
                manifest["domains"][name] = asdict(self._written(net, name, kept, dtype, old))

    def remove(self, names: Sequence[str]) -> None:
        """Forget domains, and the bases that none uses any more."""
        with self._changing() as manifest:
            for name in names:
                if name not in manifest["domains"]:
                    raise CovNormError(
                        f"{self.folder}: unknown domain {name!r}: "
                        f"{choices(name, manifest['domains'])}"
                    )
            for name in set(names):
                del manifest["domains"][name]

    def check_new(self, name: str, manifest: dict[str, Any] | None = None) -> None:
        """Refuse a name that is none, or taken."""
        if check_name(name) in (manifest or self._manifest())["domains"]:
            raise CovNormError(
                f"{self.folder}: domain {name!r} is there already: covnorm remove it, --replace "
                "it, or take another name"
            )

    def workplace(self, name: str) -> Path:
        """A folder for the unfinished work on a domain."""
        return self.folder / "work" / "domains" / check_name(name)

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _manifest(self) -> dict[str, Any]:
        """The manifest as it is on disk now; read again only when it was replaced."""
        with blame(self.file):
            stat = self.file.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if self._seen is None or self._seen[0] != seen:
            self._seen = seen, read_manifest(self.file)
        return self._seen[1]

    def _reading(self, name: str, read: Any) -> Any:
        """Read blobs of a domain; should the store change meanwhile, read them once more."""
        while True:
            manifest = self._manifest()
            entry = self.entry(name)
            try:
                return read(entry)
            except CovNormError:
                if self._manifest() is manifest:
                    raise

    def _part(self, name: str, part: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._reading(
            name,
            lambda entry: self.blobs.read_tensors(entry.blobs[part]) if part in entry.blobs else {},
        )
        return found

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """A copy of the manifest to change; it takes the old one's place if nothing fails."""
        with locked(self.folder / ".lock"):
            self._seen = None  # nobody else writes now: what is read is what is there
            manifest = copy.deepcopy(self._manifest())
            try:
                yield manifest
                used = {entry["basis"] for entry in manifest["domains"].values()}
                manifest["bases"] = {n: b for n, b in manifest["bases"].items() if n in used}
                write_manifest(self.file, manifest)
            finally:  # of this change if it failed, of the domains that went if not
                self.blobs.sweep(set(references(self._manifest())))

    def _written_basis(self, net: MultiDomainNetwork, name: str) -> dict[str, str]:
        """Its factors apart from its moments, which only joining needs."""
        record, factors, moments = basis_files.packed(net, net.basis(name))
        parts = {"tensors": factors, "moments": moments}
        blobs = {part: self.blobs.write_tensors(found) for part, found in parts.items() if found}
        return {"record": self.blobs.write_record(basis_files.FORMAT, record), **blobs}

    def _fingerprint(self, manifest: Mapping[str, Any], basis: str) -> str | None:
        """Of a basis as it is stored; None: there is none that can be read."""
        if basis not in manifest["bases"]:
            return None
        try:
            record = self.blobs.read_record(manifest["bases"][basis]["record"], basis_files.FORMAT)
        except CovNormError:
            return None
        return str(record.get("fingerprint"))

    def _rows_behind(self, manifest: Mapping[str, Any], basis: str) -> int:
        """Rows of features behind a basis as it is stored; -1: they cannot be read."""
        blobs = manifest["bases"][basis]
        try:
            tensors = self.blobs.read_tensors(blobs["moments"]) if "moments" in blobs else {}
        except CovNormError:
            return -1
        return basis_files.rows_seen(tensors)

    def _check_users(self, manifest: Mapping[str, Any], basis: str, names: Container[str]) -> None:
        """A basis changes with all of its domains, or not."""
        others = [
            name
            for name, entry in manifest["domains"].items()
            if entry["basis"] == basis and name not in names
        ]
        if others:
            raise CovNormError(
                f"{self.folder}: basis {basis!r} is shared by {', '.join(others[:4])} too, which "
                "this change leaves out: join them together, or name another --basis"
            )

    def _written(
        self,
        net: MultiDomainNetwork,
        name: str,
        kept: Details,
        dtype: torch.dtype,
        old: Mapping[str, str],
    ) -> Entry:
        domain = net.domain(name)
        record, tensors = files.packed(net, domain, dtype)
        blobs = {
            **old,
            "record": self.blobs.write_record(files.FORMAT, {**record, "name": name}),
            "tensors": self.blobs.write_tensors(tensors),
            "details": self.blobs.write_record(DETAILS, kept.facts),
        }
        if kept.trained is not None:
            record, tensors = files.packed(net, kept.trained, torch.float32)
            blobs["trained.record"] = self.blobs.write_record(files.FORMAT, record)
            blobs["trained.tensors"] = self.blobs.write_tensors(tensors)
        if kept.moments:
            blobs["moments"] = self.blobs.write_tensors(moment_files.packed(kept.moments))
        if kept.examples:
            images = {
                k: torch.frombuffer(bytearray(v), dtype=torch.uint8)
                for k, v in kept.examples.items()
            }
            blobs["examples"] = self.blobs.write_tensors(images)
        count = domain.num_parameters()
        return Entry(
            method=kept.facts["method"],
            classes=None if domain.classes is None else len(domain.classes),
            accuracy=kept.facts["results"]["accuracy"]["final"],
            parameters=count["adapter"],
            total=count["total"],
            bytes=sum(self.blobs.size(blobs[part]) for part in ("record", "tensors")),
            basis=domain.basis,
            blobs=blobs,
        )
