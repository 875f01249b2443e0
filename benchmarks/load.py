"""Load a server over HTTP: closed loops measure its capacity, open loops its latencies.

Requests choose their domain as in Punica: identical, uniform, skewed (Zipf) or distinct.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

MODES = ("identical", "uniform", "skewed", "distinct")
ZIPF = 1.5


@dataclass
class Seen:
    """Measurements of a load.

    `seconds` run from the due time of a request and so include a lag of the generator; `inside` is
    what the server reports itself.
    """

    seconds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    lasted: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return requests per second, and latencies in milliseconds."""
        return {
            "rate": round(len(self.seconds) / self.lasted, 1),
            **{f"p{p}": at(self.seconds, p) for p in (50, 95, 99)},
            "inside_p99": at(self.inside, 99),
            "refused_p99": at(self.refused, 99),
            "answers": len(self.seconds),
            "statuses": {str(k): v for k, v in sorted(self.statuses.items())},
        }


def at(seconds: list[float], percent: int) -> float | None:
    """Return a percentile in milliseconds."""
    ordered = sorted(seconds)
    place = min(len(ordered) - 1, int(len(ordered) * percent / 100))
    return round(1000 * ordered[place], 1) if ordered else None


def chooser(mode: str, count: int, seed: int = 0) -> Callable[[], str]:
    """Return a function that chooses the domain of the next request."""
    draw = random.Random(seed)
    names = [f"d{i}" for i in range(count)]
    if mode == "identical":
        return lambda: names[0]
    if mode == "distinct":
        turn = itertools.cycle(names)
        return lambda: next(turn)
    weights = [1.0 if mode == "uniform" else (i + 1) ** -ZIPF for i in range(count)]
    return lambda: draw.choices(names, weights)[0]


class Client:
    """HTTP/1.1 over persistent connections, as many as are needed at once."""

    def __init__(self, address: str, images: list[bytes]) -> None:
        self.host, port = address.split(":")
        self.port, self.images = int(port), images
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.turn = itertools.count()

    async def ask(self, domain: str, seen: Seen, due: float | None = None) -> int:
        """Send a request, timed from `due` (or now) to the last byte, and return its status."""
        start = time.perf_counter() if due is None else due
        body = self.images[next(self.turn) % len(self.images)]
        head = f"POST /v1/domains/{domain}/predict?top=1 HTTP/1.1\r\nHost: x\r\n"
        head += f"Content-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            async with self.connection() as (reader, writer):
                writer.write(head.encode() + body)
                headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                status = int(headers.split()[1])
                size = int(headers.split("content-length: ")[1].split()[0])
                answer = json.loads(await reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            status = 0
        took = time.perf_counter() - start
        seen.statuses[status] += 1
        if status == 200:
            seen.seconds.append(took)
            seen.inside.append(answer["seconds"]["total"])
        elif status == 429:
            seen.refused.append(took)
        return status

    @contextlib.asynccontextmanager
    async def connection(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        pair = self.free.pop() if self.free else None
        if pair is None or pair[0].at_eof():  # the server closes idle connections
            pair = await asyncio.open_connection(self.host, self.port)
        try:
            yield pair
        except BaseException:
            pair[1].close()
            raise
        self.free.append(pair)

    def close(self) -> None:
        for _, writer in self.free:
            writer.close()


async def closed(client: Client, choose: Callable[[], str], seconds: float, clients: int) -> Seen:
    """Run a fixed number of clients with one request each; a refused client waits briefly."""
    seen, start = Seen(), time.perf_counter()

    async def one() -> None:
        while time.perf_counter() - start < seconds:
            if await client.ask(choose(), seen) != 200:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(one() for _ in range(clients)))
    seen.lasted = time.perf_counter() - start
    return seen


async def opened(
    client: Client, choose: Callable[[], str], seconds: float, rate: float, bursty: bool = False
) -> Seen:
    """Send requests at a fixed rate whether the server answers or not: Poisson, or in bursts."""
    seen, draw, start = Seen(), random.Random(1), time.perf_counter()
    tasks, due, burst = [], 0.0, 10 if bursty else 1
    while due < seconds:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        asks = [client.ask(choose(), seen, start + due) for _ in range(burst)]
        tasks += [asyncio.create_task(ask) for ask in asks]
        due += draw.expovariate(rate / burst)
    await asyncio.gather(*tasks)
    seen.lasted = seconds
    return seen
