"""The limits of the server. Each is a number that is known before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import CovNormError


@dataclass(frozen=True)
class Limits:
    """What the server does at most, and how long it waits. README.md says where each is enforced.

    Args:
        workers: number of processes that compute. Each has its own copy of the network.
        threads: torch threads per worker; 0 leaves the choice to torch.
        batch: images per forward pass.
        wait: seconds that the first image of a batch waits for others.
        mixed: whether one batch may hold images of different domains.
        queue: images that may wait. Further ones get 429 immediately.
        deadline: seconds from an image's arrival to its result, then 504.
        resident: bytes of domains in memory, per worker. The least recently used are evicted first.
        upload: seconds that the header of a request may take, and its body.
        body: bytes per request body.
        images: images per request.
        top: predictions per image.
        hang: seconds without a reply after which a worker is killed and replaced.
        grace: seconds that a stopping server gives to accepted requests.
        pins: domains that are loaded at the start and never evicted.
    """

    workers: int = 1
    threads: int = 0
    batch: int = 16
    wait: float = 0.004
    mixed: bool = True
    queue: int = 256
    deadline: float = 2.0
    resident: int = 2_000_000_000
    upload: float = 20.0
    body: int = 32_000_000
    images: int = 64
    top: int = 100
    hang: float = 10.0
    grace: float = 20.0
    pins: tuple[str, ...] = ()

    @property
    def backlog(self) -> float:
        """Seconds of work that may wait: half of the deadline, because the pace may change."""
        return self.deadline / 2

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in ("mixed", "pins"):
                continue
            whole = isinstance(field.default, int)
            smallest, wanted = 1e-9, "above 0"
            if name in ("threads", "wait"):
                smallest, wanted = 0, "of at least 0"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < smallest:
                raise CovNormError(f"{name}={value!r} is out of range: give a number {wanted}")
            if whole and not isinstance(value, int):
                raise CovNormError(f"{name}={value!r} is not an integer: give a whole number")
