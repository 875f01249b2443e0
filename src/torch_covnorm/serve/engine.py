"""From an image to its answer: admission, decoding, the domain's place in memory, the batch."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..data.image_files import load_image
from ..ecology import Ecology
from ..errors import CovNormError
from . import auto
from .catalog import Catalog, Listed
from .limits import Limits
from .log import LOG
from .metrics import Metrics
from .pool import Changed, Pool
from .process import Died
from .queue import Request
from .refusals import Refused, bad_image, exists, failed, full, late, stopped, unknown

WATCH = 0.25  # seconds between looks at the store
DECODERS = 4  # threads that decode images
LIVES = 2  # workers that a request may lose


@dataclass(frozen=True)
class Answer:
    """Of one image: [(label, probability)], best first, and how it came about."""

    domain: str
    top: list[tuple[str, float]]
    facts: dict[str, Any]


class Engine:
    """All workers of a server, over one store. Made and used on one event loop.

    pace: seconds that an image takes for each one before it, as seen where many were: with all
    that the workers know nothing of.
    """

    def __init__(self, ecology: Ecology, limits: Limits) -> None:
        self.ecology, self.limits = ecology, limits
        self.backbone = ecology.backbone["name"] or ecology.backbone["class"]
        self.metrics = Metrics()
        self.catalog = Catalog(ecology)
        self.accepted = self.guessing = 0
        self.pace = 0.0
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        folder = str(ecology.folder)
        self.pools = [Pool(i, folder, limits, self.metrics) for i in range(limits.workers)]
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")
        self._tasks: list[asyncio.Task[None]] = []

    def run(self) -> None:
        """Begin to serve."""
        for pool in self.pools:
            pool.run()
        self._tasks = [asyncio.create_task(self._watch())]
        self._tasks += [asyncio.create_task(self._pin(p)) for p in self.pools if self.limits.pins]

    async def drain(self) -> None:
        """Take nothing new, and wait for what was accepted."""
        self.stopping = True
        until = self.loop.time() + self.limits.grace
        while self.accepted and self.loop.time() < until:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """End the workers, behind `drain`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(pool.stop() for pool in self.pools))
        self._decoders.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Whether every worker has answered lately."""
        return not self.stopping and all(pool.process.is_ready() for pool in self.pools)

    # ── one image ────────────────────────────────────────────────────────────────────────────

    async def ask(self, domain: str, image: bytes, top: int, name: str = "image") -> Answer:
        """The answer of a domain to an image file's bytes, within the deadline; or `Refused`."""
        arrived = self.loop.time()
        deadline = arrived + self.limits.deadline
        self._admit()
        before = self._before()
        self.accepted += 1
        self.metrics.queue_depth.set(self.accepted)
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._answer(domain, image, top, name, deadline)
        except TimeoutError:
            self._saw(domain, before, self.limits.deadline)
            raise late(self.limits.deadline) from None
        finally:
            self.accepted -= 1
            self.metrics.queue_depth.set(self.accepted)
        took = self.loop.time() - arrived
        self._saw(domain, before, took)
        self.metrics.images.inc()
        self.metrics.request_seconds.observe(took)
        return answer

    def _saw(self, domain: str, before: int, seconds: float) -> None:
        """Learn the pace from what was answered or late; what is refused says nothing about it."""
        if before >= self.limits.batch and domain != auto.NAME:
            self.pace += 0.1 * (seconds / (before + 1) - self.pace)

    def _admit(self) -> None:
        """Refuse at once what could not be answered in time."""
        if self.stopping:
            raise stopped()
        pace = min(pool.pace for pool in self.pools) / len(self.pools)
        ahead = self._before() * max(self.pace, pace)
        if self.accepted >= self.limits.queue or ahead > self.limits.patience:
            raise full(max(1.0, ahead))

    def _before(self) -> int:
        """Images that a new one waits for; what waits for a guess has a queue of its own."""
        return self.accepted - self.guessing

    async def _answer(
        self, domain: str, image: bytes, top: int, name: str, deadline: float
    ) -> Answer:
        guessed: dict[str, Any] = {}
        if domain == auto.NAME:
            guessed = await self._guessed(image, name)
            domain = guessed["domain"]
        listed = self.catalog.find(domain)
        pixels = await self.decoded(image, listed.size, listed.fit, name)
        lives = LIVES
        while lives:
            now = self.catalog.find(domain)  # it may have been replaced meanwhile
            if (now.size, now.fit) != (listed.size, listed.fit):
                listed, pixels = now, await self.decoded(image, now.size, now.fit, name)
                continue
            try:
                found, facts = await self._batched(now, pixels, top, deadline)
                return Answer(domain, found, {**facts, **guessed})
            except Changed:
                continue
            except Died:  # it is replaced, and asked once more
                lives -= 1
        raise stopped()

    async def _batched(
        self, listed: Listed, pixels: Any, top: int, deadline: float
    ) -> tuple[list[tuple[str, float]], dict[str, Any]]:
        pool = self._choose(listed)
        resident = await pool.hold(listed)
        try:
            future = self.loop.create_future()
            request = Request(listed.name, pixels, top, self.loop.time(), deadline, future)
            pool.queue.put(request)
            return await future, request.facts
        finally:
            pool.release(resident)

    async def decoded(self, image: bytes, size: int, fit: str, name: str) -> Any:
        """An image as a domain reads it: uint8 (3, size, size)."""

        def decode() -> Any:
            return load_image(image, size, fit, name=name).contiguous()

        try:
            return await self.loop.run_in_executor(self._decoders, decode)
        except CovNormError as error:
            raise bad_image(str(error)) from None

    def _choose(self, listed: Listed) -> Pool:
        """The worker with the least to do, of those that have the domain where any has."""
        there = [p for p in self.pools if listed.name in p.residents.held and p.process.is_up]
        idle = self.idlest()
        if not there:
            return idle
        best = min(there, key=lambda p: len(p.queue))
        return best if len(best.queue) <= len(idle.queue) + self.limits.batch else idle

    def idlest(self) -> Pool:
        """The worker with the least to do."""
        return min(self.pools, key=lambda p: (not p.process.is_up, len(p.queue)))

    async def _guessed(self, image: bytes, name: str) -> dict[str, Any]:
        self.guessing += 1
        try:
            for _ in range(LIVES):
                with contextlib.suppress(Died):
                    return await auto.guess(self, image, name)
            raise stopped()
        finally:
            self.guessing -= 1

    # ── the store ────────────────────────────────────────────────────────────────────────────

    async def keep(self, name: str, folder: str, replace: bool) -> None:
        """Put uploaded files into the store, by way of a worker, which knows the backbone."""
        try:
            fault = await self.idlest().process.work("keep", name, folder, replace)
        except Died:
            raise stopped() from None
        if fault is None:
            return
        if not replace and name in self.catalog.entries():
            raise exists(name)
        whose, why = fault
        said = f"domain {name!r}: {self.catalog.plain(why.replace(f'{folder}/', ''))}"
        raise failed(said) if whose == "failed" else Refused(409, "broken_domain", said)

    async def forget(self, name: str) -> None:
        """Take a domain out of the store."""
        self.catalog.find_entry(name)
        try:
            await asyncio.to_thread(self.ecology.remove, [name])
        except CovNormError as error:
            said = self.catalog.plain(str(error))
            if name not in self.catalog.entries():  # somebody else was faster
                raise unknown(name, "it is gone already") from None
            raise Refused(409, "broken_domain", f"domain {name!r} stays: {said}") from None

    def status(self) -> dict[str, Any]:
        """What the page shows."""
        pools = self.pools
        return {
            "ready": self.ready,
            "domains": len(self.catalog.entries()),
            "images": self.metrics.total(self.metrics.images),
            "switches": self.metrics.switches,
            "queue": self.accepted,
            "queue_limit": self.limits.queue,
            "resident": sum(len(p.residents.held) for p in pools),
            "resident_bytes": sum(p.residents.bytes for p in pools),
            "workers": [
                {
                    "pid": p.process.pid,
                    "ready": p.process.is_ready(),
                    "restarts": p.process.restarts,
                }
                for p in pools
            ],
            "backbone": self.backbone,
            "deadline": self.limits.deadline,
        }

    async def _pin(self, pool: Pool) -> None:
        """Have the pinned domains in memory, from the start and whatever happens."""
        said: dict[str, str] = {}
        while True:
            for name in self.limits.pins:
                try:
                    pool.release(await pool.hold(self.catalog.find(name)))
                except (Refused, Died, Changed) as why:  # it may come, or be mended
                    if isinstance(why, Refused) and said.get(name) != why.message:
                        said[name] = why.message
                        LOG.warning("pin", extra={"said": {"why": why.message}})
            await asyncio.sleep(1.0)

    async def _watch(self) -> None:
        """Follow the store: what changed is served anew, what went is let go."""
        before: object = None
        while True:
            if (versions := self.catalog.versions()) is not before:
                before = versions
                self.metrics.domains.set(len(versions))
                for pool in self.pools:
                    pool.follow(versions)
            await asyncio.sleep(WATCH)
