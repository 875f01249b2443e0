"""From an image to its answer: admission, decoding, the domain's place in memory, the batch."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..data.decode import load_image
from ..ecology import Ecology
from ..errors import CovNormError
from .catalog import Catalog, Listed
from .limits import Limits
from .metrics import Metrics
from .pool import Died, Pool
from .queue import Request
from .refusals import Refused, bad_image, full, late, stopped

WATCH = 0.25  # seconds between looks at the store
DECODERS = 4  # threads that decode images
AUTO = "auto"


@dataclass(frozen=True)
class Answer:
    """Of one image: [(label, probability)], best first, and how it came about."""

    domain: str
    top: list[tuple[str, float]]
    facts: dict[str, Any]


class Engine:
    """All workers of a server, over one store. Made and used on one event loop."""

    def __init__(self, ecology: Ecology, limits: Limits) -> None:
        self.ecology, self.limits = ecology, limits
        self.metrics = Metrics()
        self.catalog = Catalog(ecology)
        self.accepted = 0
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
        return not self.stopping and all(pool.is_ready() for pool in self.pools)

    async def ask(self, domain: str, image: bytes, top: int, name: str = "image") -> Answer:
        """The answer of a domain to an image file's bytes, within the deadline; or `Refused`."""
        arrived = self.loop.time()
        try:
            self._admit()
            answer = await self._within(arrived, self._answer(domain, image, top, name, arrived))
        except Refused as refused:
            self.metrics.errors.labels(refused.reason).inc()
            raise
        self.metrics.images.inc()
        self.metrics.request_seconds.observe(self.loop.time() - arrived)
        return answer

    def _admit(self) -> None:
        """Refuse at once what could not be answered in time."""
        if self.stopping:
            raise stopped()
        pace = min(pool.pace for pool in self.pools) / len(self.pools)
        ahead = self.accepted * pace
        if self.accepted >= self.limits.queue or ahead > 0.8 * self.limits.deadline:
            raise full(max(1.0, ahead))

    async def _within(self, arrived: float, work: Any) -> Answer:
        self.accepted += 1
        self.metrics.queue_depth.set(self.accepted)
        try:
            async with asyncio.timeout_at(arrived + self.limits.deadline):
                found: Answer = await work
                return found
        except TimeoutError:
            raise late(self.limits.deadline) from None
        finally:
            self.accepted -= 1
            self.metrics.queue_depth.set(self.accepted)

    async def _answer(
        self, domain: str, image: bytes, top: int, name: str, arrived: float
    ) -> Answer:
        guessed: dict[str, Any] = {}
        if domain == AUTO:
            guessed = await self._guess(image, name)
            domain = guessed["domain"]
        listed = self.catalog.find(domain)
        pixels = await self._decoded(image, listed.size, listed.fit, name)
        for _ in range(2):  # a worker that dies is replaced, and asked once more
            pool = self._choose(listed)
            try:
                resident = await pool.hold(listed)
            except Died:
                continue
            try:
                future = self.loop.create_future()
                deadline = arrived + self.limits.deadline
                request = Request(domain, pixels, top, self.loop.time(), deadline, future)
                pool.queue.put(request)
                found = await future
                return Answer(domain, found, {**request.facts, **guessed})
            except Died:
                continue
            finally:
                pool.release(resident)
        raise stopped()

    async def _decoded(self, image: bytes, size: int, fit: str, name: str) -> Any:
        def decode() -> Any:
            return load_image(image, size, fit, name=name).contiguous()

        try:
            return await self.loop.run_in_executor(self._decoders, decode)
        except CovNormError as error:
            raise bad_image(str(error)) from None

    def _choose(self, listed: Listed) -> Pool:
        """The worker with the least to do, of those that have the domain where any has."""
        there = [p for p in self.pools if listed.name in p.residents.held and p.answered]
        idle = min(self.pools, key=lambda p: (p.answered is None, len(p.queue)))
        if not there:
            return idle
        best = min(there, key=lambda p: len(p.queue))
        return best if len(best.queue) <= len(idle.queue) + self.limits.batch else idle

    async def _guess(self, image: bytes, name: str) -> dict[str, Any]:
        """Which domain an image is of, by the statistics that every domain keeps."""
        listed = self._listed()
        pool = min(self.pools, key=lambda p: (p.answered is None, len(p.queue)))
        sizes = {n: (d.size, d.fit) for n, d in listed.items()}
        images = {}
        for key in set(sizes.values()):
            images[key] = (await self._decoded(image, *key, name)).numpy()
        try:
            await self._learned(pool, {n: d.version for n, d in listed.items()})
            found, _ = await pool.call("guess", sizes, images)
        except Died:
            raise stopped() from None
        if isinstance(found, str):
            raise Refused(500, "failed", found)
        if not found:
            raise Refused(422, "no_domain", "domain 'auto': no domain here keeps statistics")
        best = found[0]
        if not best["fits"]:
            raise Refused(
                422,
                "no_domain_fits",
                f"domain 'auto': none fits this image (the nearest is {best['domain']!r}): name "
                "the domain",
            )
        return {"domain": best["domain"], "confidence": best["chance"], "candidates": found[:5]}

    def _listed(self) -> dict[str, Listed]:
        """Every domain that can be served."""
        found = {}
        for name in self.catalog.names():
            with contextlib.suppress(Refused):
                found[name] = self.catalog.find(name)
        return found

    async def _learned(self, pool: Pool, wanted: dict[str, str]) -> None:
        """The worker knows these by their statistics; learning goes on if nobody waits for it."""
        if pool.learned != wanted and pool.learning is None:

            async def learn() -> None:
                try:
                    await pool.work("learn", wanted)
                    pool.learned = wanted
                finally:
                    pool.learning = None

            pool.learning = asyncio.create_task(learn())
        if pool.learning is not None:
            await asyncio.shield(pool.learning)

    async def keep(self, name: str, folder: str, replace: bool) -> None:
        """Put uploaded files into the store, by way of a worker, which knows the backbone."""
        pool = min(self.pools, key=lambda p: (p.answered is None, len(p.queue)))
        try:
            problem = await pool.work("keep", name, folder, replace)
        except Died:
            raise stopped() from None
        if problem is not None:
            raise Refused(409, "broken_domain", f"domain {name!r}: {problem}")

    def status(self) -> dict[str, Any]:
        """What the page shows."""
        pools = self.pools
        return {
            "ready": self.ready,
            "domains": len(self.catalog.names()),
            "images": self.metrics.total(self.metrics.images),
            "switches": self.metrics.switches,
            "queue": self.accepted,
            "queue_limit": self.limits.queue,
            "resident": sum(len(p.residents.held) for p in pools),
            "resident_bytes": sum(p.residents.bytes for p in pools),
            "workers": [
                {"pid": p.pid, "ready": p.is_ready(), "restarts": p.restarts} for p in pools
            ],
            "backbone": self.ecology.backbone["name"] or self.ecology.backbone["class"],
            "deadline": self.limits.deadline,
        }

    async def _pin(self, pool: Pool) -> None:
        """Have the pinned domains in memory from the start."""
        for name in self.limits.pins:
            while True:
                try:
                    pool.release(await pool.hold(self.catalog.find(name)))
                    break
                except Refused:
                    await asyncio.sleep(1.0)  # it may come, or be mended
                except Died:
                    continue

    async def _watch(self) -> None:
        """Follow the store: what changed is served anew, what went is let go."""
        before: object = None
        while True:
            with contextlib.suppress(CovNormError):  # damaged: go on with what is known
                if (now := self.ecology.stamp) != before:
                    versions = self.catalog.versions()
                    self.metrics.domains.set(len(versions))
                    for pool in self.pools:
                        pool.follow(versions)
                    before = now
            await asyncio.sleep(WATCH)
