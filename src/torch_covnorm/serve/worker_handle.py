"""One worker as the engine sees it: its process, its queue, and the domains in its memory.

Everything here runs on the event loop. A worker that dies is replaced, and the requests it had are
repeated on the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import numpy as np

from ..ecology import Ecology
from .auto import GuessClient
from .catalog import ServedDomain
from .errors import DomainChanged, RequestError, WorkerDied
from .limits import Limits
from .log import LOG
from .metrics import Metrics
from .process import WorkerProcess
from .queue import ImageResult, Queue, QueuedImage
from .residents import Resident, Residents

TURN = 0.1  # seconds that a domain in use stays at least while another one waits for its room


class WorkerHandle:
    """One worker. `pace`: seconds per image, as measured lately."""

    def __init__(self, number: int, ecology: Ecology, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.loop = asyncio.get_running_loop()
        self.process = WorkerProcess(ecology, limits, self._exited)
        self.queue = Queue(self.loop.time, limits.mixed)
        self.residents = Residents(limits.resident)
        self.guesses = GuessClient(self.process, limits.backlog)
        self.pace = 0.02
        self._freed = asyncio.Event()  # wakes the loads that wait for room
        self._batches = asyncio.create_task(self._run_batches())
        metrics.residents.labels(str(number)).set_function(lambda: len(self.residents.held))
        metrics.resident_bytes.labels(str(number)).set_function(lambda: self.residents.bytes)

    async def stop(self) -> None:
        """End the worker."""
        self._batches.cancel()
        await self.process.stop()

    def _exited(self) -> None:
        self.metrics.restarts.inc()
        for queued in self.queue.drain():
            queued.fail(WorkerDied())
        self.residents = Residents(self.limits.resident)
        self._freed.set()

    # ── domains in memory ────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def hold(self, domain: ServedDomain) -> AsyncIterator[None]:
        """Load a domain if needed, and keep it in memory inside the `with`. Loads are shared."""
        while True:
            resident = self.residents.held.get(domain.name)
            if resident and resident.version == domain.version and not resident.turn_over:
                break
            await self._make_room_and_load(domain)
        self.residents.hold(resident.name)
        resident.outdated = False  # if it was, it has come back as it was
        try:
            await asyncio.shield(resident.load)
            yield
        finally:
            if self.residents.held.get(resident.name) is resident:
                self.residents.release(resident)
                self._drop_if_due(resident)
                if resident.idle:
                    self._freed.set()

    async def _make_room_and_load(self, domain: ServedDomain) -> None:
        """Begin a load, or wait for a change of what prevents it; the caller looks again."""
        if not self.process.up.is_set():
            await self.process.up.wait()
            return
        new = Resident(domain.name, domain.version, domain.bytes, domain.basis)
        new.pinned = new.name in self.limits.pins
        if self.residents.never_fits(new):
            raise RequestError(
                "no_room", f"domain {new.name!r} does not fit into memory. Raise --resident."
            )
        for resident in self.residents.conflicts(new):
            resident.outdated = True
            self._drop_if_due(resident)
        victims = self.residents.room_for(new.bytes)
        if victims is None or self.residents.conflicts(new):
            await self._wait(victims is None)
            return
        for victim in victims:
            self._drop(victim)
        self.residents.add(new)
        new.load = asyncio.create_task(self._load(new))
        new.load.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._freed.set()

    async def _load(self, resident: Resident) -> None:
        name = resident.name
        try:
            size, seconds = await self.process.background("load", name, resident.version)
            if self.residents.held.get(name) is not resident:  # the process has ended since
                raise WorkerDied
        except (RequestError, DomainChanged) as error:
            if self.residents.held.get(name) is resident:
                self.residents.load_failed(resident)
                self._freed.set()
            if isinstance(error, RequestError):
                self.metrics.loads.labels("failed").inc()
            raise
        resident.bytes, resident.loading, resident.loaded_at = size, False, self.loop.time()
        self.metrics.loads.labels("ok").inc()
        self.metrics.load_seconds.observe(seconds)
        self._drop_if_due(resident)
        for victim in self.residents.room_for(0) or ():  # it may be larger than its estimate
            self._drop(victim)
        self._freed.set()

    async def _wait(self, for_room: bool) -> None:
        """Wait until a domain leaves. If all are in use all the time, they take turns."""
        self._freed.clear()
        left: float | None = None
        if for_room and (oldest := self.residents.next_turn_over()) is not None:
            left = oldest.loaded_at + TURN - self.loop.time()
            if left <= 0:
                oldest.turn_over, left = True, None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._freed.wait(), left)

    def follow(self, versions: dict[str, str]) -> None:
        """Drop what the store has replaced or removed, now or as soon as nobody uses it."""
        for resident in list(self.residents.held.values()):
            if versions.get(resident.name) != resident.version:
                resident.outdated = True
                self._drop_if_due(resident)

    def _drop_if_due(self, resident: Resident) -> None:
        if resident.idle and (resident.turn_over or resident.outdated):
            self._drop(resident, evicted=resident.turn_over)

    def _drop(self, resident: Resident, evicted: bool = True) -> None:
        self.metrics.evictions.inc(evicted)
        self.residents.drop(resident)
        self.process.send("drop", resident.name)
        self._freed.set()

    # ── batches ──────────────────────────────────────────────────────────────────────────────

    async def _run_batches(self) -> None:
        while True:
            batch = await self.queue.next_batch(self.limits.batch, self.limits.wait)
            try:
                await self._run_batch(batch)
            except WorkerDied:  # the engine repeats the images
                for queued in batch:
                    queued.fail(WorkerDied())
            except Exception as error:  # the next batch is computed whatever happened to this one
                LOG.exception("batch")
                for queued in batch:
                    queued.fail(RequestError("failed", repr(error)))

    async def _run_batch(self, batch: Sequence[QueuedImage]) -> None:
        began = self.loop.time()
        domains = [queued.domain for queued in batch]
        images = np.stack([queued.image.numpy() for queued in batch])
        tops = [queued.top for queued in batch]
        results, seconds = await self.process.compute("batch", domains, images, tops)
        self.pace += 0.2 * ((self.loop.time() - began) / len(batch) - self.pace)
        sizes = {"images": len(batch), "domains": len(set(domains))}
        self.metrics.batch_images.observe(sizes["images"])
        self.metrics.batch_domains.observe(sizes["domains"])
        self.metrics.compute_seconds.observe(seconds)
        for queued, result in zip(batch, results, strict=True):
            waited = began - queued.arrived
            self.metrics.queue_seconds.observe(waited)
            if isinstance(result, RequestError):
                queued.fail(result)
            elif not queued.future.done():
                times = {"queue": waited, "compute": seconds}
                queued.future.set_result(ImageResult(queued.domain, result, sizes, times))
