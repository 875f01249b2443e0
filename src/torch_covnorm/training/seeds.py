"""Derive random numbers from the position in a run, so that it can be repeated and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_all(*position: object) -> None:
    """Seed every generator that a loader, an augmentation or a dropout may draw from."""
    value = _number(position)
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def seed_loader(loader: object, *position: object) -> None:
    """Seed the private generators of a DataLoader and its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler)
    for holder in (*holders, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(_number((*position, "loader")))


def _number(position: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(position).encode()).digest()[:7], "little")


@contextlib.contextmanager
def random_numbers_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the caller's random generators on exit."""
    python, numpy_ = random.getstate(), np.random.get_state()
    cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_)
