"""Store a domain in float32, float16 or int8: what its file takes, and what rounding costs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..adapters import CovNormMap
from ..network import files
from ..network.domain import Domain
from ..network.network import MultiDomainNetwork
from ..records import sealed
from ..training.evaluation import evaluate
from .covnorm import absorb_

# From the most to the least precise.
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
SMALLEST = "smallest"  # whichever gives the smallest file within max_drop


def round_(net: MultiDomainNetwork, name: str, dtype: torch.dtype) -> None:
    """Round a domain to what its file will hold, so that what is measured is what is served."""
    domain = net.domain(name)
    record, tensors = files.packed(net, domain, dtype)
    here = Path(f"domain {name!r}")
    net.domains[name] = files.unpacked(
        net, record, tensors, name, copy.deepcopy(domain.own), here, here
    )


def stored_bytes(net: MultiDomainNetwork, domain: str | Domain, dtype: torch.dtype) -> int:
    """Return the bytes of a domain's tensors and record, as the store writes them."""
    whole = net.domain(domain) if isinstance(domain, str) else domain
    record, tensors = files.packed(net, whole, dtype)
    return len(safetensors.torch.save(tensors)) + len(sealed(files.FORMAT, record))


@contextlib.contextmanager
def as_stored(net: MultiDomainNetwork, name: str, precision: str | None) -> Iterator[None]:
    """Make the domain, inside, what its file will hold: M absorbed, numbers rounded.

    `precision` None rounds nothing.
    """
    kept = net.domain(name)
    try:
        if any(isinstance(A, CovNormMap) for A in kept.maps.values()):
            net.domains[name] = copy.deepcopy(kept)
            absorb_(net, name)
        if precision is not None:
            round_(net, name, PRECISIONS[precision])
        yield
    finally:
        net.domains[name] = kept


def storage_of(
    net: MultiDomainNetwork, name: str, val: Iterable[Any] | None
) -> dict[str, dict[str, Any]]:
    """Return {precision: {"bytes", "accuracy"}}: the file and validation accuracy in each.

    The accuracy is in percent; None without validation data.
    """
    found = {}
    for precision, dtype in PRECISIONS.items():
        with as_stored(net, name, precision):
            accuracy = None if val is None else evaluate(net, name, val).accuracy
            found[precision] = {"bytes": stored_bytes(net, name, dtype), "accuracy": accuracy}
    return found
