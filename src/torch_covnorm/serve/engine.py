"""From an image to its prediction: admission, decoding, the choice of a worker, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from ..data.image_files import load_image
from ..data.images import InputShape
from ..ecology import Ecology
from ..errors import CovNormError
from . import errors
from .auto import AUTO
from .catalog import Catalog
from .errors import DomainChanged, RequestError, WorkerDied
from .limits import Limits
from .log import LOG
from .metrics import Metrics
from .queue import ImageResult
from .worker_handle import WorkerHandle

WATCH = 0.25  # seconds between looks at the store
DECODERS = 4  # threads that decode images
ATTEMPTS = 2  # workers that may die under a request before it gets 503


class Engine:
    """All workers of a server, over one store. Create it and use it on one event loop.

    pace: seconds that an image takes for every image before it, measured under load. It includes
    what the workers do not measure: decoding, and the event loop itself.
    """

    def __init__(self, ecology: Ecology, limits: Limits) -> None:
        self.ecology, self.limits = ecology, limits
        self.backbone = ecology.backbone["name"] or ecology.backbone["class"]
        self.metrics = Metrics()
        self.catalog = Catalog(ecology)
        self.accepted = self.guessing = 0
        self.metrics.queue_depth.set_function(lambda: self.accepted)
        self.metrics.domains.set_function(lambda: len(self.catalog.entries()))
        self.pace = 0.0
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        count = limits.workers
        self.workers = [WorkerHandle(i, ecology, limits, self.metrics) for i in range(count)]
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")
        pinning = [self._keep_pinned(worker) for worker in self.workers if limits.pins]
        self._tasks = [asyncio.create_task(task) for task in (self._follow_store(), *pinning)]

    async def stop(self) -> None:
        """End the workers. The web server has waited for the accepted requests before."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        self._decoders.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Whether a forward pass succeeded recently in every worker."""
        return not self.stopping and all(worker.process.is_ready() for worker in self.workers)

    def is_resident(self, name: str) -> bool:
        """Return whether a domain is in the memory of any worker."""
        return any(name in worker.residents.held for worker in self.workers)

    # ── one image ────────────────────────────────────────────────────────────────────────────

    async def predict(
        self, domain: str, image: bytes, top: int, name: str = "image"
    ) -> ImageResult:
        """Predict an image file's bytes within the deadline, or raise `RequestError`.

        domain: a name, or "auto". name: how error messages call the image.
        """
        arrived = self.loop.time()
        deadline = arrived + self.limits.deadline
        before = self._admit()
        self.accepted += 1
        try:
            async with asyncio.timeout_at(deadline):
                result = await self._predict(domain, image, top, name, deadline)
        except TimeoutError:
            self._learn_pace(domain, before, self.limits.deadline)
            raise errors.deadline_passed(self.limits.deadline) from None
        finally:
            self.accepted -= 1
        seconds = self.loop.time() - arrived
        self._learn_pace(domain, before, seconds)
        self.metrics.images.inc()
        self.metrics.request_seconds.observe(seconds)
        return result

    def _learn_pace(self, domain: str, before: int, seconds: float) -> None:
        """Update the pace from a result or a timeout; errors say nothing about it."""
        if before >= self.limits.batch and domain != AUTO:
            self.pace += 0.1 * (seconds / (before + 1) - self.pace)

    def _admit(self) -> int:
        """Return the images that a new one waits for; reject what cannot be computed in time."""
        if self.stopping:
            raise errors.unavailable()
        ahead = self.accepted - self.guessing  # guesses have a separate queue
        pace = min(worker.pace for worker in self.workers) / len(self.workers)
        seconds = ahead * max(self.pace, pace)
        if self.accepted >= self.limits.queue or seconds > self.limits.backlog:
            raise errors.queue_full(seconds)
        return ahead

    async def _predict(
        self, domain: str, image: bytes, top: int, name: str, deadline: float
    ) -> ImageResult:
        guess: dict[str, Any] = {}
        if domain == AUTO:
            guess = await self._guess(image, name)
            domain = guess["domain"]
        decoded: InputShape | None = None
        attempts = ATTEMPTS
        while attempts:
            served = self.catalog.find(domain)  # it may have been replaced meanwhile
            if served.shape != decoded:
                pixels = await self._decode(image, served.shape, name)
                decoded = served.shape
                continue
            worker = self._choose_worker(domain)
            try:
                async with worker.hold(served):
                    result = await worker.queue.put(domain, pixels, top, deadline).future
                return dataclasses.replace(result, **guess)
            except DomainChanged:
                continue
            except WorkerDied:
                attempts -= 1
        raise errors.unavailable()

    async def _decode(self, image: bytes, shape: InputShape, name: str) -> Tensor:
        """Decode an image as a domain needs it: uint8 (3, size, size)."""
        try:
            return await self.loop.run_in_executor(
                self._decoders, lambda: load_image(image, *shape, name=name).contiguous()
            )
        except CovNormError as error:
            raise RequestError("bad_image", str(error)) from None

    def _choose_worker(self, domain: str) -> WorkerHandle:
        """Return the worker with the least to do, preferably one that has the domain in memory."""
        idlest = self._idlest()
        having = [w for w in self.workers if domain in w.residents.held and w.process.up.is_set()]
        best = min(having, key=lambda w: len(w.queue), default=idlest)
        return best if len(best.queue) <= len(idlest.queue) + self.limits.batch else idlest

    def _idlest(self) -> WorkerHandle:
        return min(self.workers, key=lambda w: (not w.process.up.is_set(), len(w.queue)))

    async def _guess(self, image: bytes, name: str) -> dict[str, Any]:
        self.guessing += 1
        try:
            for _ in range(ATTEMPTS):
                with contextlib.suppress(WorkerDied):
                    served = self.catalog.servable()
                    shapes = {domain.shape for domain in served.values()}
                    images = {s: (await self._decode(image, s, name)).numpy() for s in shapes}
                    worker = min(
                        self.workers,
                        key=lambda w: (not w.process.up.is_set(), w.guesses.waiting, len(w.queue)),
                    )
                    return await worker.guesses.guess(served, images)
            raise errors.unavailable()
        finally:
            self.guessing -= 1

    # ── the store ────────────────────────────────────────────────────────────────────────────

    async def store_domain(self, name: str, folder: str, replace: bool) -> None:
        """Add uploaded files to the store. A worker does it, because it knows the backbone."""
        try:
            await self._idlest().process.background("store", name, folder, replace)
        except WorkerDied:
            raise errors.unavailable() from None
        except RequestError:
            if replace or name not in self.catalog.entries():
                raise
            message = f"domain {name!r} exists. Send ?replace=true or use another name."
            raise RequestError("exists", message) from None

    async def remove_domain(self, name: str, purge: bool = False) -> None:
        """Remove a domain from the store, with `purge` its earlier versions too."""
        self.catalog.find_entry(name)
        try:
            await asyncio.to_thread(self.ecology.remove, [name], purge)
        except CovNormError as error:
            self.catalog.find_entry(name)  # 404 if another request has removed it meanwhile
            why = errors.without_paths(str(error), self.ecology.folder)
            message = f"domain {name!r} was not removed: {why}"
            raise RequestError("broken_domain", message) from None

    def status(self) -> dict[str, Any]:
        """Return what the page shows."""
        return {
            "ready": self.ready,
            "domains": len(self.catalog.entries()),
            "images": self.metrics.total("images_total"),
            "switches": self.metrics.total("batch_domains_sum"),
            "queue": self.accepted,
            "queue_limit": self.limits.queue,
            "resident": sum(len(w.residents.held) for w in self.workers),
            "resident_bytes": sum(w.residents.bytes for w in self.workers),
            "workers": [
                {"pid": process.pid, "ready": process.is_ready(), "restarts": process.restarts}
                for process in (worker.process for worker in self.workers)
            ],
            "backbone": self.backbone,
            "deadline": self.limits.deadline,
        }

    async def _keep_pinned(self, worker: WorkerHandle) -> None:
        """Keep the pinned domains in a worker's memory, also after it was replaced."""
        logged: dict[str, str] = {}
        while True:
            for name in self.limits.pins:
                try:
                    async with worker.hold(self.catalog.find(name)):
                        pass
                except (WorkerDied, DomainChanged):
                    continue
                except RequestError as error:  # it may be added or repaired later
                    if logged.get(name) != error.message:
                        logged[name] = error.message
                        LOG.warning("pin", extra={"fields": {"why": error.message}})
            await asyncio.sleep(1.0)

    async def _follow_store(self) -> None:
        """Drop from memory what the store has replaced or removed."""
        known: object = None
        while True:
            if (versions := self.catalog.versions()) is not known:
                known = versions
                for worker in self.workers:
                    worker.follow(versions)
            await asyncio.sleep(WATCH)
