"""A domain's files that came over the network: checked against the backbone, then kept."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import torch

from ..ecology import Ecology
from ..ecology.measure import sizes
from ..ecology.store import Details
from ..errors import CovNormError
from ..network.basis import RECORD as BASIS
from ..records import blame
from .catalog import check_servable


def keep(ecology: Ecology, name: str, folder: Path, replace: bool) -> None:
    """Keep what ``export --to domain`` wrote, under a name; all is checked before the store is.

    Shapes, finiteness, checksums and the backbone's fingerprint are, as for any domain; there are
    no results to keep, as nothing was measured here.
    """
    if not replace:
        ecology.check_new(name)
    net = ecology.network()
    if (folder / "basis" / BASIS).exists():
        net.load_basis(folder / "basis")
    net.load_domain(folder, name)
    check_servable(net.domain(name).preprocessing, name)
    dtype = _dtype(folder)
    said = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "what": "upload"}
    found = sizes(net, name, dtype)
    accuracy = dict.fromkeys(("before", "adapted", "compressed", "final"))
    history = {"accuracy": None, "stages": accuracy, "parameters": found["counted"]}
    results: dict[str, Any] = {
        "on": "nothing: it was uploaded",
        "accuracy": accuracy,
        "ranks": {},
        "seconds": {},
        "spectra": {},
        "confusion": None,
        "examples": [],
        "dtype": str(dtype).removeprefix("torch."),
        **found,
    }
    facts = {
        "method": "upload",
        "settings": {"method": "upload"},
        "results": results,
        "source": {"images": {}, "balance": {}, "left_out": [], "twice": []},
        "history": [{**said, "method": "upload", **history, "bytes": found["bytes"]}],
    }
    ecology.put(net, {name: Details(facts)}, dtype, replace)


def _dtype(folder: Path) -> torch.dtype:
    """As its files store it: int8, float16 or float32."""
    kinds: set[torch.dtype] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with blame(file), safetensors.safe_open(file, "pt") as tensors:
            kinds |= {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118
    if not kinds:
        raise CovNormError("no .safetensors file was given: send the domain's tensors too")
    return next((d for d in (torch.int8, torch.float16) if d in kinds), torch.float32)
