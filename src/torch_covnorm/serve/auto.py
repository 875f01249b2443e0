"""`domain: auto`: the worker that knows the domains is asked which of them an image is of."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from .catalog import Listed
from .pool import Pool
from .refusals import Refused, failed, full

if TYPE_CHECKING:
    from .engine import Engine

NAME = "auto"


async def guess(engine: Engine, image: bytes, name: str) -> dict[str, Any]:
    """{"domain", "confidence", "candidates"} by the statistics that every domain keeps."""
    listed = _servable(engine)
    pool = min(engine.pools, key=lambda p: (not p.process.is_up, p.guesses, len(p.queue)))
    sizes = {n: (d.size, d.fit) for n, d in listed.items()}
    images = {}
    for key in set(sizes.values()):
        images[key] = (await engine.decoded(image, *key, name)).numpy()
    await pool.process.up()
    await _learned(pool, {n: d.statistics for n, d in listed.items()})
    found = await _asked(pool, sizes, images)
    if isinstance(found, tuple):
        raise failed(found[1])
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


async def _asked(pool: Pool, sizes: dict[str, Any], images: dict[Any, Any]) -> Any:
    """One guess at a time is in the worker, so that batches come in between; those that wait are
    refused where they could not be in time, and dropped when they are late."""
    ahead = pool.guesses * pool.guess_seconds
    if ahead > pool.limits.patience:
        raise full(max(1.0, ahead))
    pool.guesses += 1
    try:
        await pool.guessing.acquire()
    except BaseException:  # late, or the client is gone: nothing was sent
        pool.guesses -= 1
        raise
    call = asyncio.create_task(pool.process.call("guess", sizes, images))

    def done(call: asyncio.Task[Any]) -> None:
        pool.guessing.release()
        pool.guesses -= 1
        if not call.cancelled() and call.exception() is None:
            pool.guess_seconds += 0.5 * (call.result()[1] - pool.guess_seconds)

    call.add_done_callback(done)
    return (await asyncio.shield(call))[0]


def _servable(engine: Engine) -> dict[str, Listed]:
    found = {}
    for name in engine.catalog.entries():
        with contextlib.suppress(Refused):
            found[name] = engine.catalog.find(name)
    return found


async def _learned(pool: Pool, wanted: dict[str, str]) -> None:
    """The worker knows these by their statistics; learning goes on if nobody waits for it."""
    if pool.learned != wanted and pool.learning is None:

        async def learn() -> None:
            pid = pool.process.pid
            try:
                await pool.process.work("learn", wanted)
                if pool.process.pid == pid:  # else another worker is there, which knows none
                    pool.learned = wanted
            finally:
                pool.learning = None

        pool.learning = asyncio.create_task(learn())
        pool.learning.add_done_callback(lambda task: task.cancelled() or task.exception())
    if pool.learning is not None:
        await asyncio.shield(pool.learning)
