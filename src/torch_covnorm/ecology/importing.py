"""`import`: store the files that ``export --to domain`` or `save_domain` wrote as a domain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from .. import records
from ..errors import CovNormError
from ..network import basis as basis_files
from ..network import files
from ..network.domain import check_name
from ..network.network import MultiDomainNetwork
from .measure import facts_after, sizes
from .prediction import check_preprocessing
from .store import Details, Ecology


def import_domain(
    ecology: Ecology,
    folder: Path,
    name: str | None = None,
    *,
    replace: bool = False,
    basis: str | None = None,
    what: str = "import",
    source: dict[str, Any] | None = None,
    check: Callable[[Any, str], object] = check_preprocessing,
    backbone: nn.Module | None = None,
) -> str:
    """Store the domain of a folder, and the basis in its ``basis/``; return the domain's name.

    Shapes, finiteness, checksums, preprocessing and the backbone's fingerprint are checked before
    the store changes, which is one step. The domain has no results: nothing was measured here.

    Args:
        name: by default the name in the folder.
        replace: allow an existing domain.
        basis: another name for the shared basis, if the store has one of the same name.
        what: the word for the history and the method.
        source: where it came from, for the details.
        check: called with the preprocessing and the domain's name; raises if it is unusable.
        backbone: the caller's module, if the ecology was created with one.
    """
    file = folder / files.RECORD
    if not file.is_file():
        raise CovNormError(
            f"{folder}: has no {files.RECORD}: give a folder that covnorm export --to domain wrote"
        )
    record = records.read(file, files.FORMAT)
    with records.blame(file):
        name = check_name(record["name"] if name is None else name)
        wanted, tensors = record.get("basis"), record["tensors"]["sha256"]
    if not replace:
        ecology.check_new(name)
    net = ecology.network(backbone)
    with records.blame(file):
        _load_basis_(ecology, net, folder, wanted, basis)
    net.load_domain(folder, name)
    check(net.domain(name).preprocessing, name)
    dtype = _stored_dtype(records.tensor_file(file, record))
    results: dict[str, Any] = {
        "on": f"nothing ({what})",
        "accuracy": dict.fromkeys(("before", "adapted", "compressed", "final")),
        "ranks": {},
        "seconds": {},
        "spectra": {},
        "confusion": None,
        "examples": [],
        "dtype": str(dtype).removeprefix("torch."),
        **sizes(net, name, dtype),
    }
    empty: dict[str, Any] = {"images": {}, "balance": {}, "left_out": [], "twice": []}
    origin = {**empty, "tensors": tensors, **(source or {})}
    old = ecology.domains.get(name)
    earlier = {"source": origin, "history": ecology.events(old) if old else []}
    facts = facts_after(what, {"method": what}, results, earlier)
    ecology.put(net, {name: Details(facts)}, dtype, replace)
    return name


def _load_basis_(
    ecology: Ecology,
    net: MultiDomainNetwork,
    folder: Path,
    wanted: dict[str, str] | None,
    rename: str | None,
) -> None:
    """Add the basis that a domain shares to the network: the folder's, or else the store's."""
    if wanted is None:
        return
    place = folder / "basis"
    if (place / basis_files.RECORD).exists():
        found = basis_files.load(net, place)
        found.name = check_name(found.name if rename is None else rename)
        net.bases[found.name] = found
    elif wanted["name"] in ecology.bases:
        ecology.load_basis(net, wanted["name"])
    if wanted["fingerprint"] not in {shared.fingerprint for shared in net.bases.values()}:
        raise CovNormError(
            f"shares the basis {wanted['name']!r} ({wanted['fingerprint'][:12]}), which is neither "
            f"in {place} nor in this ecology: export the domain again with covnorm export --to "
            "domain, which writes its basis too"
        )


def _stored_dtype(file: Path) -> torch.dtype:
    """Return the precision that a domain's tensors were saved in."""
    with records.blame(file), safetensors.safe_open(file, "pt") as tensors:
        dtypes = {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118
    return next((d for d in (torch.int8, torch.float16) if d in dtypes), torch.float32)
