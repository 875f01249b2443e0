"""The limits of the server. Each is a number that is known before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import CovNormError


@dataclass(frozen=True)
class Limits:
    """What the server does at most, and how long it waits; README.md: where each is enforced."""

    workers: int = 1  # processes that compute, each with its own copy of the network
    threads: int = 0  # torch threads per worker; 0: its share of the CPUs, see `threads.py`
    batch: int = 16  # images per forward pass
    wait: float = 0.004  # seconds that the first image of a batch waits for others
    mixed: bool = True  # whether one batch may hold images of different domains
    queue: int = 256  # images that may wait; further ones get 429 immediately
    deadline: float = 2.0  # seconds from an image's arrival to its result, then 504
    resident: int = 2_000_000_000  # bytes of domains in memory, per worker
    upload: float = 20.0  # seconds for the header of a request, and for its body
    body: int = 32_000_000  # bytes per request body
    images: int = 64  # per request
    top: int = 100  # predictions per image
    hang: float = 10.0  # seconds without a reply after which a worker is replaced
    grace: float = 20.0  # seconds that a stopping server gives to accepted requests
    pins: tuple[str, ...] = ()  # domains that are loaded at the start and never evicted

    @property
    def backlog(self) -> float:
        """Seconds of work that may wait: half of the deadline, because the pace may change."""
        return self.deadline / 2

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in ("mixed", "pins"):
                continue
            whole, from_0 = isinstance(field.default, int), name in ("threads", "wait")
            number = isinstance(value, int if whole else int | float) and type(value) is not bool
            if not number or not (0 if from_0 else 1e-9) <= value < math.inf:
                wanted = "a whole number" if whole else "a number"
                wanted += " of at least 0" if from_0 else " above 0"
                raise CovNormError(f"{name}={value!r} is out of range: give {wanted}")
