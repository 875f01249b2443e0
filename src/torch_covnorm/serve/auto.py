"""`domain: auto`, on the server's side: ask one worker which domain an image belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..data.images import InputShape
from .catalog import ServedDomain
from .errors import RequestError, queue_full
from .process import WorkerProcess

AUTO = "auto"


class GuessClient:
    """Guesses of one worker. `waiting` counts those that it makes or that wait for it."""

    def __init__(self, process: WorkerProcess, backlog: float) -> None:
        self.waiting = 0
        self._process, self._backlog = process, backlog
        self._seconds = 0.0  # per guess, as measured lately
        self._one_at_a_time = asyncio.Lock()
        # The process that has learned, because its successor knows nothing, and what it learned.
        self._learned: tuple[int | None, dict[str, str]] = (None, {})
        self._learning: asyncio.Task[Any] | None = None

    async def guess(
        self, served: Mapping[str, ServedDomain], images: Mapping[InputShape, np.ndarray]
    ) -> dict[str, Any]:
        """Return {"domain", "confidence", "candidates"} for an image, or raise 422.

        images: the image as uint8 (3, size, size), for every input shape of the domains.
        """
        await self._process.up.wait()
        await self._learn({name: domain.statistics for name, domain in served.items()})
        shapes = {name: domain.shape for name, domain in served.items()}
        found = await self._call(shapes, images)
        if not found:
            raise RequestError(
                "no_domain", "domain 'auto': no domain has statistics. Please name the domain."
            )
        best = found[0]
        if not best["fits"]:
            raise RequestError(
                "no_domain_fits",
                f"domain 'auto': no domain fits this image (the nearest is {best['domain']!r}). "
                "Please name the domain.",
            )
        return {"domain": best["domain"], "confidence": best["chance"], "candidates": found[:5]}

    async def _call(self, *args: Any) -> Any:
        """Call the worker with one guess at a time, so that batches get their turn in between."""
        ahead = self.waiting * self._seconds
        if ahead > self._backlog:
            raise queue_full(ahead)
        self.waiting += 1
        try:
            await self._one_at_a_time.acquire()
        except BaseException:  # past its deadline, or the client is gone: nothing was sent
            self.waiting -= 1
            raise
        call = asyncio.create_task(self._process.compute("guess", *args))

        def done(call: asyncio.Task[Any]) -> None:
            self._one_at_a_time.release()
            self.waiting -= 1
            if not call.cancelled() and call.exception() is None:
                self._seconds += 0.5 * (call.result()[1] - self._seconds)

        call.add_done_callback(done)
        return (await asyncio.shield(call))[0]

    async def _learn(self, versions: dict[str, str]) -> None:
        """Let the worker learn statistics. It continues even if the caller is cancelled."""
        wanted = self._process.pid, versions

        def done(task: asyncio.Task[Any]) -> None:
            self._learning = None
            if not task.cancelled() and task.exception() is None:
                self._learned = wanted

        if self._learned != wanted and self._learning is None:
            self._learning = asyncio.create_task(self._process.background("learn", versions))
            self._learning.add_done_callback(done)
        if self._learning is not None:
            await asyncio.shield(self._learning)
