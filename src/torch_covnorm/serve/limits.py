"""The server's settings, each a number that can be told beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import CovNormError


@dataclass(frozen=True)
class Limits:
    """What the server does at most, and when it gives up.

    workers: processes that compute, each with the network; threads: of torch in each.
    batch: images of one forward pass; wait: seconds that a first image waits for company.
    mixed: whether images of different domains share a pass.
    queue: images that may wait; more are refused at once (429).
    deadline: seconds that an answer may take, queueing and all; then 504.
    resident: bytes of domains in memory, a worker; the least recently used go first.
    upload: seconds that a request's header may take, and its body; body: its bytes.
    images: images of one request. top: answers an image at most.
    hang: seconds without an answer after which a worker is taken for dead.
    grace: seconds that a stopping server gives the requests under way.
    pins: domains that are loaded at the start and never make room.
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
    def patience(self) -> float:
        """Seconds of work that may wait: half of the deadline, since the pace may change."""
        return self.deadline / 2

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in ("mixed", "pins"):
                continue
            value = getattr(self, field.name)
            least = 0 if field.name in ("threads", "wait") else 1e-9
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < least:
                raise CovNormError(f"{field.name}={value!r}: give a number above 0")
        for name in ("workers", "threads", "batch", "queue", "resident", "body", "images", "top"):
            if not isinstance(getattr(self, name), int):
                raise CovNormError(f"{name}={getattr(self, name)!r}: give a whole number")
