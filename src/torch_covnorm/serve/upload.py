"""Store a domain whose files were uploaded, after checking them against the backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors
import torch

from ..ecology import Ecology
from ..ecology.measure import facts_after, sizes
from ..ecology.store import Details
from ..errors import CovNormError
from ..network.basis import RECORD as BASIS
from ..records import blame
from .catalog import check_servable


def store_upload(ecology: Ecology, name: str, folder: Path, replace: bool) -> None:
    """Store the files that ``export --to domain`` wrote, under a name.

    Shapes, finiteness, checksums and the backbone's fingerprint are checked before the store
    changes. The domain has no results, because nothing was measured here.
    """
    if not replace:
        ecology.check_new(name)
    net = ecology.network()
    if (folder / "basis" / BASIS).exists():
        net.load_basis(folder / "basis")
    net.load_domain(folder, name)
    check_servable(net.domain(name).preprocessing, name)
    dtype = _stored_dtype(folder)
    results: dict[str, Any] = {
        "on": "nothing: it was uploaded",
        "accuracy": dict.fromkeys(("before", "adapted", "compressed", "final")),
        "ranks": {},
        "seconds": {},
        "spectra": {},
        "confusion": None,
        "examples": [],
        "dtype": str(dtype).removeprefix("torch."),
        **sizes(net, name, dtype),
    }
    source: dict[str, Any] = {"images": {}, "balance": {}, "left_out": [], "twice": []}
    facts = facts_after("upload", {"method": "upload"}, results, {"source": source})
    ecology.put(net, {name: Details(facts)}, dtype, replace)


def _stored_dtype(folder: Path) -> torch.dtype:
    dtypes: set[torch.dtype] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with blame(file), safetensors.safe_open(file, "pt") as tensors:
            dtypes |= {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118
    if not dtypes:
        raise CovNormError("the upload has no .safetensors file: send the domain's tensors too")
    return next((d for d in (torch.int8, torch.float16) if d in dtypes), torch.float32)
