"""A worker with its queue and the domains in its memory. All on the event loop.

A worker that dies is replaced; the requests it had go to the new one, once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .catalog import Listed
from .limits import Limits
from .log import LOG
from .metrics import Metrics
from .process import Died, Process
from .queue import Queue, Request
from .refusals import Refused, broken, failed, no_room
from .residents import Resident, Residents

TURN = 0.1  # seconds that a domain stays at least, though it is in use and another waits for room


class Changed(Exception):
    """The store has another version of the domain by now: look again."""


class Pool:
    """One worker. `pace`: seconds an image, as measured lately.

    Of `auto`: what the worker has `learned`, and the `guesses` that it makes or that wait.
    """

    def __init__(self, number: int, folder: str, limits: Limits, metrics: Metrics) -> None:
        self.number, self.limits, self.metrics = number, limits, metrics
        self.loop = asyncio.get_running_loop()
        self.process = Process(folder, limits, self._heard, self._ended)
        self.queue = Queue(self.loop.time, limits.mixed)
        self.residents = Residents(limits.resident)
        self.pace = 0.02
        self.learned: dict[str, str] = {}  # {domain: version of its statistics}
        self.learning: asyncio.Task[None] | None = None
        self.guessing = asyncio.Lock()
        self.guesses, self.guess_seconds = 0, 0.0
        self._loads: dict[str, asyncio.Future[None]] = {}
        self._freed = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Begin to serve the queue."""
        self._serving = asyncio.create_task(self._batches())

    async def stop(self) -> None:
        """End the worker, with everything that it has."""
        if self._serving is not None:
            self._serving.cancel()
        await self.process.stop()

    def _heard(self, word: str, name: str, *rest: Any) -> None:
        """How a load went."""
        resident, load = self.residents.held[name], self._loads.pop(name)
        if word == "loaded":
            resident.bytes, seconds = rest
            resident.loading, resident.since = False, self.loop.time()
            self.metrics.loads.labels("ok").inc()
            self.metrics.load_seconds.observe(seconds)
            load.set_result(None)
            self._let_go(resident)
            self._evict(self.residents.room_for(0) or [])  # it may be larger than it seemed
        else:
            self.residents.lose(resident)
            if word == "failed":
                self.metrics.loads.labels("failed").inc()
            load.set_exception(broken(name, rest[0]) if word == "failed" else Changed())
        self._freed.set()
        self._measure()

    def _ended(self) -> None:
        """What requests hold is gone with the worker's memory."""
        self.metrics.restarts.inc()
        for load in self._loads.values():
            load.set_exception(Died())
        self._loads.clear()
        self.learned = {}
        _tell(self.queue.drain(), Died)
        self.residents = Residents(self.limits.resident)
        self._freed.set()
        self._measure()

    # ── domains ──────────────────────────────────────────────────────────────────────────────

    async def hold(self, listed: Listed) -> Resident:
        """Have a domain in memory and keep it there until `release`; loads are shared."""
        while True:
            found = self.residents.held.get(listed.name)
            if found is not None and found.version == listed.version and not found.over:
                break
            await self._load(listed)
        self.residents.hold(found.name)
        found.leaving = False  # should it have left: it has come back as it was
        if found.loading:
            try:
                await asyncio.shield(self._loads[found.name])
            except BaseException:
                self.release(found)
                raise
        return found

    async def _load(self, listed: Listed) -> None:
        """Make room and ask for it; or wait until something changed that was in the way."""
        if not self.process.is_up:
            await self.process.up()
            return  # others may have asked for it meanwhile
        new = Resident(listed.name, listed.version, listed.bytes, listed.basis)
        new.pinned = new.name in self.limits.pins
        if self.residents.never_fits(new):
            raise no_room(listed.name)
        for resident in self.residents.conflicts(new):
            resident.leaving = True
            self._let_go(resident)
        victims = self.residents.room_for(new.bytes)
        if victims is None or self.residents.conflicts(new):
            await self._wait(victims is None)
            return
        self._evict(victims)
        self.residents.add(new)
        load = self._loads[new.name] = self.loop.create_future()
        load.add_done_callback(lambda f: f.cancelled() or f.exception())
        self.process.send("load", new.name, new.version)
        self._measure()

    async def _wait(self, for_room: bool) -> None:
        """Until something goes. Where all are in use all the time, they take turns."""
        self._freed.clear()
        left: float | None = None
        if for_room and (oldest := self.residents.oldest()) is not None:
            left = oldest.since + TURN - self.loop.time()
            if left <= 0:
                oldest.over, left = True, None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._freed.wait(), left)

    def release(self, resident: Resident) -> None:
        """One request less that needs it."""
        if self.residents.held.get(resident.name) is resident:
            self.residents.release(resident)
            self._let_go(resident)
            if resident.idle:
                self._freed.set()

    def follow(self, versions: dict[str, str]) -> None:
        """The store changed: what is gone or replaced leaves, now or when nobody uses it."""
        for resident in list(self.residents.held.values()):
            if versions.get(resident.name) != resident.version:
                resident.leaving = True
                self._let_go(resident)

    def _let_go(self, resident: Resident) -> None:
        if resident.over and resident.idle:
            self._evict([resident])
        elif resident.leaving and resident.idle:
            self._drop(resident)

    def _evict(self, victims: Sequence[Resident]) -> None:
        for resident in victims:
            self.metrics.evictions.inc()
            self._drop(resident)

    def _drop(self, resident: Resident) -> None:
        self.residents.drop(resident)
        self.process.send("drop", resident.name)
        self._freed.set()
        self._measure()

    def _measure(self) -> None:
        self.metrics.resident_bytes.labels(str(self.number)).set(self.residents.bytes)
        self.metrics.residents.labels(str(self.number)).set(len(self.residents.held))

    # ── batches ──────────────────────────────────────────────────────────────────────────────

    async def _batches(self) -> None:
        while True:
            batch = await self.queue.batch(self.limits.batch, self.limits.wait)
            try:
                await self._batch(batch)
            except Died:
                _tell(batch, Died)
            except Exception as error:  # the next batch is served whatever happened to this one
                LOG.exception("batch")
                _tell(batch, partial(failed, repr(error)))

    async def _batch(self, batch: Sequence[Request]) -> None:
        began = self.loop.time()
        domains = [r.domain for r in batch]
        images = np.stack([r.image.numpy() for r in batch])
        asked = "batch", domains, images, [r.top for r in batch]
        answers, seconds = await self.process.call(*asked)
        if isinstance(answers, tuple):  # nothing of the batch could be answered
            answers = [answers] * len(batch)
        self.pace += 0.2 * ((self.loop.time() - began) / len(batch) - self.pace)
        self.metrics.batch(len(batch), len(set(domains)), seconds)
        for request, answer in zip(batch, answers, strict=True):
            self.metrics.queue_seconds.observe(began - request.arrived)
            request.facts = {
                "batch": len(batch),
                "domains": len(set(domains)),
                "queued": began - request.arrived,
                "computed": seconds,
            }
            if isinstance(answer, tuple):
                whose, why = answer
                fault = partial(broken, request.domain) if whose == "broken" else failed
                _tell([request], partial(fault, why))
            elif not request.future.done():
                request.future.set_result(answer)


def _tell(requests: Sequence[Request], why: Callable[[], Died | Refused]) -> None:
    """Tell those who wait. Died: each may try once more, with the worker that comes."""
    for request in requests:
        if not request.future.done():
            request.future.set_exception(why())
