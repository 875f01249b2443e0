"""Requests on their way into batches: earliest deadline first, filled across domains."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .refusals import late


@dataclass(eq=False)
class Request:
    """An image for a domain. `future` gets the answer; `deadline` is a time of the loop's clock."""

    domain: str
    image: torch.Tensor  # uint8 (3, size, size)
    top: int
    arrived: float
    deadline: float
    future: asyncio.Future[Any]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Images of one size share a batch."""
        return int(self.image.shape[-1])

    def goes_with(self, other: Request, mixed: bool) -> bool:
        """Whether both may be in one batch."""
        return self.size == other.size and (mixed or self.domain == other.domain)


class Queue:
    """What waits for a worker, all of it on one event loop."""

    def __init__(self, now: Callable[[], float], mixed: bool = True) -> None:
        self.now, self.mixed = now, mixed
        self._heap: list[tuple[float, int, Request]] = []
        self._order = itertools.count()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return sum(1 for _, _, r in self._heap if not r.future.done())

    def put(self, request: Request) -> None:
        """Let it wait for its turn."""
        heapq.heappush(self._heap, (request.deadline, next(self._order), request))
        self._changed.set()

    def take(self, most: int) -> list[Request]:
        """Up to `most` requests of one size (and domain, where batches are not mixed), earliest
        deadline first; late ones get their 504."""
        taken: list[Request] = []
        kept: list[tuple[float, int, Request]] = []
        while self._heap and len(taken) < most:
            item = heapq.heappop(self._heap)
            request = item[2]
            if request.future.done():
                continue
            if request.deadline <= self.now():
                request.future.set_exception(late(request.deadline - request.arrived))
            elif taken and not request.goes_with(taken[0], self.mixed):
                kept.append(item)
            else:
                taken.append(request)
        for item in kept:
            heapq.heappush(self._heap, item)
        return taken

    async def batch(self, most: int, wait: float) -> list[Request]:
        """The next batch: full, or what has come when its first image has waited long enough."""
        while True:
            self._changed.clear()
            waiting = [r for _, _, r in self._heap if not r.future.done()]
            if not waiting:
                await self._changed.wait()
                continue
            left = min(r.arrived for r in waiting) + wait - self.now()
            if len(waiting) < most and left > 0:
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    pass
                else:
                    continue
            if taken := self.take(most):
                return taken

    def drain(self) -> list[Request]:
        """All that wait, out of the queue."""
        waiting = [r for _, _, r in sorted(self._heap, key=lambda item: item[:2])]
        self._heap.clear()
        return [r for r in waiting if not r.future.done()]
