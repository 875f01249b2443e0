"""Random numbers as a function of where a run is, so that it can be repeated and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_all(*position: object) -> None:
    """Seed every generator that a loader, an augmentation or a dropout may draw from."""
    value = int.from_bytes(hashlib.sha256(repr(position).encode()).digest()[:7], "little")
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


@contextlib.contextmanager
def random_numbers_kept(device: torch.device | None = None) -> Iterator[None]:
    """The caller's random numbers are the same behind as before."""
    python, numpy_ = random.getstate(), np.random.get_state()
    cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_)
