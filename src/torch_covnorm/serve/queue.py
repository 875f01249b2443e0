"""The queue of one worker: images wait here until they become a batch, across domains."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import deadline_passed


@dataclass(frozen=True)
class ImageResult:
    """The prediction for one image, and how it was computed.

    predictions: [{"label", "probability"}], best first. batch: {"images", "domains"}. seconds:
    {"queue", "compute"}. confidence, candidates: only if the domain was `auto`.
    """

    domain: str
    predictions: list[dict[str, Any]]
    batch: dict[str, int]
    seconds: dict[str, float]
    confidence: float | None = None
    candidates: list[dict[str, Any]] | None = None


@dataclass(eq=False)
class QueuedImage:
    """An image that waits for its batch. Times are those of the event loop's clock."""

    domain: str
    image: torch.Tensor  # uint8 (3, size, size)
    top: int
    arrived: float
    deadline: float
    future: asyncio.Future[ImageResult]

    @property
    def size(self) -> int:
        """The side in pixels. Only images of one size share a batch."""
        return int(self.image.shape[-1])

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless it has a result or was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)

    def fits_batch_of(self, other: QueuedImage, mixed: bool) -> bool:
        """Return whether both images can be in one batch."""
        return self.size == other.size and (mixed or self.domain == other.domain)


class Queue:
    """Images that wait for one worker, earliest deadline first. Used on one event loop."""

    def __init__(self, now: Callable[[], float], mixed: bool = True) -> None:
        self.now, self.mixed = now, mixed
        self._images: list[QueuedImage] = []  # by deadline
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting())

    def _waiting(self) -> list[QueuedImage]:
        return [queued for queued in self._images if not queued.future.done()]

    def put(self, domain: str, image: torch.Tensor, top: int, deadline: float) -> QueuedImage:
        """Add an image, uint8 (3, size, size). Its `future` gets the result."""
        future = asyncio.get_running_loop().create_future()
        queued = QueuedImage(domain, image, top, self.now(), deadline, future)
        insort(self._images, queued, key=lambda image: image.deadline)
        self._changed.set()
        return queued

    def take(self, most: int) -> list[QueuedImage]:
        """Remove and return up to `most` images that can share a batch, earliest deadline first.

        Images past their deadline get their 504 instead.
        """
        taken: list[QueuedImage] = []
        left: list[QueuedImage] = []
        for queued in self._waiting():
            if queued.deadline <= self.now():
                queued.fail(deadline_passed(queued.deadline - queued.arrived))
            elif len(taken) < most and (not taken or queued.fits_batch_of(taken[0], self.mixed)):
                taken.append(queued)
            else:
                left.append(queued)
        self._images = left
        return taken

    async def next_batch(self, most: int, wait: float) -> list[QueuedImage]:
        """Wait until `most` images are here, or the first has waited for `wait` seconds."""
        while True:
            self._changed.clear()
            waiting = self._waiting()
            if not waiting:
                await self._changed.wait()
                continue
            left = min(queued.arrived for queued in waiting) + wait - self.now()
            if len(waiting) < most and left > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
                    continue
            if taken := self.take(most):
                return taken

    def drain(self) -> list[QueuedImage]:
        """Remove and return every image that still waits, earliest deadline first."""
        waiting, self._images = self._waiting(), []
        return waiting
