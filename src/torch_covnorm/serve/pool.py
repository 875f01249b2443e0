"""A worker seen from the server: its process, what it has in memory, and who waits for it.

All on the event loop, but for one thread that reads the pipe. A worker that dies or hangs is
replaced; the requests it had go to the new one, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import worker
from .catalog import Listed
from .limits import Limits
from .metrics import Metrics
from .queue import Queue, Request
from .refusals import Refused, broken, no_room
from .residents import Resident, Residents, State

PROBE = 2.0  # seconds between forward passes when nothing else is to do
RESTART = 0.2  # seconds before a worker is started again


class Died(Exception):
    """The worker ended, or was ended, with something under way."""


class Pool:
    """One worker process. `ready` is the time of its last answer; None: it has given none yet."""

    def __init__(self, number: int, folder: str, limits: Limits, metrics: Metrics) -> None:
        self.number, self.folder, self.limits, self.metrics = number, folder, limits, metrics
        self.loop = asyncio.get_running_loop()
        self.queue = Queue(self.loop.time)
        self.residents = Residents(limits.resident)
        self.answered: float | None = None
        self.busy_since: float | None = None
        self.pace = 0.02  # seconds an image, as measured lately
        self.pid: int | None = None
        self.restarts = 0
        self.learned: dict[str, str] = {}  # of `auto`: {domain: version}
        self.learning: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._slow: set[int] = set()
        self._loads: dict[str, asyncio.Future[Resident]] = {}
        self._freed = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._start()

    # ── the process ──────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        arguments = (theirs, self.folder, self.limits.threads)
        self._process = spawn.Process(target=worker.main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.answered, self.busy_since = None, self.loop.time()
        reader = threading.Thread(target=self._read, args=(self._pipe, self._process), daemon=True)
        reader.start()

    def _read(self, pipe: Any, process: Any) -> None:
        """The thread that hears the worker; its silence is its death."""
        with contextlib.suppress(EOFError, OSError, RuntimeError):
            while True:
                message = pipe.recv()
                self.loop.call_soon_threadsafe(self._heard, process, message)
        process.join()
        with contextlib.suppress(RuntimeError):  # the loop may be gone too
            self.loop.call_soon_threadsafe(self._ended, process)

    def _heard(self, process: Any, message: tuple[Any, ...]) -> None:
        if process is not self._process:
            return
        word, *rest = message
        if word == "started":
            self.pid, self.busy_since = rest[0], None
            self._tasks.append(self.loop.create_task(self._probe()))
        elif word == "did":
            number, answer, seconds = rest
            if (call := self._calls.pop(number, None)) and not call.done():
                call.set_result((answer, seconds))
        elif word == "loaded":
            name, version, size, seconds = rest
            self.metrics.loads.labels("ok").inc()
            self.metrics.load_seconds.observe(seconds)
            resident = self.residents.held[name]
            resident.state, resident.version, resident.bytes = State.READY, version, size
            self._loads.pop(name).set_result(resident)
        elif word == "failed":
            name, why = rest
            self.metrics.loads.labels("failed").inc()
            self.residents.drop(self.residents.held[name])
            self._loads.pop(name).set_exception(broken(name, why))
            self._freed.set()
        self._measure()

    def _ended(self, process: Any) -> None:
        if process is not self._process or self._stopping:
            return
        self.restarts += 1
        self.metrics.restarts.inc()
        self.answered = self.pid = None
        for call in self._calls.values():
            if not call.done():
                call.set_exception(Died())
        self._calls.clear()
        for load in self._loads.values():
            load.set_exception(Died())
        self._loads.clear()
        self.learned = {}
        _died(self.queue.drain())  # what they hold is gone with the worker's memory
        self.residents = Residents(self.limits.resident)
        self._freed.set()
        self._measure()
        self.loop.call_later(RESTART, lambda: None if self._stopping else self._start())

    async def call(self, word: str, *rest: Any) -> tuple[Any, float]:
        """Its answer, and the seconds that it took there; `Died` if it does not live to tell.

        For what its network computes: no answer for long means that it hangs, and ends it.
        """
        number, future = self._ask(word, *rest)
        if self.busy_since is None:
            self.busy_since = self.loop.time()
        try:
            answer: tuple[Any, float] = await asyncio.wait_for(future, self.limits.hang)
        except TimeoutError:
            self._process.kill()  # it hangs: its end is heard by the reader
            raise Died from None
        finally:
            self._calls.pop(number, None)
            self.busy_since = self.loop.time() if self._calls.keys() - self._slow else None
        self.answered = self.loop.time()
        return answer

    async def work(self, word: str, *rest: Any) -> Any:
        """The answer to what may take its time, in a thread beside the network's."""
        number, future = self._ask(word, *rest)
        self._slow.add(number)
        try:
            return (await future)[0]
        finally:
            self._slow.discard(number)
            self._calls.pop(number, None)

    def _ask(self, word: str, *rest: Any) -> tuple[int, asyncio.Future[Any]]:
        number, future = next(self._numbers), self.loop.create_future()
        self._calls[number] = future
        self._send(word, number, *rest)
        return number, future

    def _send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # a broken pipe: the reader hears of it too
            self._pipe.send(message)

    def run(self) -> None:
        """Begin to serve the queue, and to look whether the worker lives."""
        self._tasks = [asyncio.create_task(self._batches()), asyncio.create_task(self._probes())]

    async def stop(self) -> None:
        """End it, with everything that it has."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        self._send("stop")
        await asyncio.to_thread(self._process.join, 5.0)
        if self._process.is_alive():
            self._process.kill()

    def is_ready(self, within: float = 5.0) -> bool:
        """Whether a real forward pass was answered lately, and none is overdue."""
        now = self.loop.time()
        overdue = self.busy_since is not None and now - self.busy_since > within
        return self.answered is not None and not overdue and now - self.answered < within + PROBE

    async def _probes(self) -> None:
        while True:
            await asyncio.sleep(PROBE)
            if self.pid is not None and not self._calls.keys() - self._slow:
                await self._probe()

    async def _probe(self) -> None:
        with contextlib.suppress(Died):
            await self.call("probe")

    # ── domains ──────────────────────────────────────────────────────────────────────────────

    async def hold(self, listed: Listed) -> Resident:
        """Have a domain in memory and keep it there until `release`; loads are shared."""
        while True:
            found = self.residents.held.get(listed.name)
            if found is not None and found.version == listed.version and found.state is State.READY:
                return self.residents.hold(listed.name)
            if found is not None and found.state is State.LOADING:
                await asyncio.shield(self._loads[listed.name])
                loaded = self.residents.held.get(listed.name)
                if loaded is not None and loaded.state is State.READY:
                    return self.residents.hold(listed.name)  # the store's newest, whatever it was
                continue
            await self._load(listed)

    async def _load(self, listed: Listed) -> None:
        """Make room and ask for it; what is in its way leaves when nobody uses it any more."""
        new = Resident(listed.name, listed.version, listed.bytes, listed.basis)
        new.pinned = new.name in self.limits.pins
        old = self.residents.conflicts(new)
        for resident in old:
            resident.state = State.LEAVING
        if any(r.uses or r.state is State.LOADING for r in old):
            self._freed.clear()
            await self._freed.wait()
            return
        for resident in old:
            self.drop(resident)
        victims = self.residents.room_for(new.bytes)
        if victims is None:
            if new.bytes > self.limits.resident or not self.residents.held:
                raise no_room(listed.name)
            self._freed.clear()
            await self._freed.wait()
            return
        for resident in victims:
            self.metrics.evictions.inc()
            self.drop(resident)
        if self.answered is None:
            await asyncio.sleep(RESTART)  # it starts
            return
        self.residents.add(new)
        self._loads[new.name] = self.loop.create_future()
        self._loads[new.name].add_done_callback(lambda f: f.cancelled() or f.exception())
        self._send("load", new.name)
        self._measure()

    def release(self, resident: Resident) -> None:
        """One request less that needs it."""
        if self.residents.held.get(resident.name) is resident:
            self.residents.release(resident)
            if not resident.uses:
                self._freed.set()

    def drop(self, resident: Resident) -> None:
        """Out of memory."""
        self.residents.drop(resident)
        self._send("drop", resident.name)
        self._freed.set()
        self._measure()

    def follow(self, versions: dict[str, str]) -> None:
        """The store changed: what is gone or replaced leaves, now or when nobody uses it."""
        for resident in list(self.residents.held.values()):
            if versions.get(resident.name) != resident.version:
                if resident.state is State.READY:
                    resident.state = State.LEAVING
                if not resident.uses and resident.state is State.LEAVING:
                    self.drop(resident)

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
                _died(batch)

    async def _batch(self, batch: Sequence[Request]) -> None:
        began = self.loop.time()
        domains = [r.domain for r in batch]
        images = np.stack([r.image.numpy() for r in batch])
        answers, seconds = await self.call("batch", domains, images, [r.top for r in batch])
        if isinstance(answers, str):  # nothing of the batch could be answered
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
            if request.future.done():
                continue
            if isinstance(answer, str):
                request.future.set_exception(Refused(500, "failed", answer))
            else:
                request.future.set_result(answer)


def _died(requests: Sequence[Request]) -> None:
    """Tell those who wait: each may try once more, with the worker that comes."""
    for request in requests:
        if not request.future.done():
            request.future.set_exception(Died())
