"""The server under load: mixed batches against one domain at a time and an LRU of whole models.

    python -m benchmarks.serving [--fresh] [--seconds 5]

One generator drives three real servers over HTTP, in turn and on the same machine: ours; the same
with batches of one domain at a time; and the same with one fine-tuned network a domain, of which
four fit into memory (method fnft, ``--resident``), the least recently used out first. Domains are
copies of one under other names, which is the same work. What is measured goes to
results/serving.jsonl as it comes.

Requests choose their domain as in Punica: identical, uniform, skewed (Zipf), distinct. Closed
loops of 4 to 32 clients find the capacity, the best of them; an open loop, Poisson or bursty, finds
latencies at 0.7 of it and at three times it. Generator and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import torch_covnorm as cn
from torch_covnorm.data import load_sample
from torch_covnorm.ecology import Ecology
from torch_covnorm.ecology.store import Details

from .ledger import Lines

PIXELS, BATCH, DEADLINE, ZIPF = 64, 16, 2.0, 1.5
CLIENTS = (4, 8, 16, 32)  # of the closed loop: the best of them is the capacity
MODES = ("identical", "uniform", "skewed", "distinct")
FITS = 4  # whole models in memory


# ── ecologies ────────────────────────────────────────────────────────────────────────────────


def make(folder: Path, count: int, method: str) -> Ecology:
    """`count` domains of one kind: CovNorm at 1/8 of its adapters, or a copy of the network."""
    ecology = Ecology.create(folder, "efficientnet-lite0")
    net = ecology.network()
    torch.manual_seed(0)
    if method == "fnft":
        net.add_domain("first", 10, "own")
    else:
        whole = net.add_domain("first", 10, "residual")
        x = torch.randn(64, 3, PIXELS, PIXELS)
        budget = whole.num_parameters()["adapter"] // 8
        cn.normalize_(net, "first", cn.collect(net, "first", [x]), budget=budget)
        cn.absorb_(net, "first")
    how = {**ecology.backbone["preprocessing"], "size": PIXELS, "fit": "squash"}
    accuracy = {"before": None, "adapted": None, "compressed": None, "final": None}
    facts = {"method": method, "results": {"accuracy": accuracy}, "settings": {}, "history": []}
    net.domain("first").preprocessing = how
    for i in range(count):
        net.copy_domain("first", f"d{i}")
        ecology.put(net, {f"d{i}": Details(facts)})
        net.remove_domain(f"d{i}")
    return ecology


# ── servers ──────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, int]]:
    """(address without scheme, pid) of a server that is ready; it is stopped behind."""
    command = [sys.executable, "-m", "torch_covnorm", "serve", str(folder), "--port", "0", "--json"]
    command += ["--batch", str(BATCH), "--deadline", str(DEADLINE), *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            until = time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(f"{address}/ready") as answer:
                        assert answer.status == 200
                    break
                except OSError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.2)
            yield address.removeprefix("http://"), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def memory(pid: int) -> int:
    """Bytes that a server and its workers hold for themselves (USS), without shared pages."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(_uss(int(p)) for p in [pid, *tasks])


def _uss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    values = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(values)


# ── load ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """What a load met: seconds of each answer, and how many of each status."""

    seconds: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    lasted: float = 0.0

    def row(self) -> dict[str, Any]:
        """As numbers: requests a second, latencies in milliseconds."""
        ms = sorted(1000 * s for s in self.seconds) or [float("nan")]
        at = {p: round(ms[min(len(ms) - 1, int(len(ms) * p / 100))], 1) for p in (50, 95, 99)}
        refused = sorted(1000 * s for s in self.refused)
        return {
            "rate": round(len(self.seconds) / self.lasted, 1),
            **{f"p{p}": value for p, value in at.items()},
            "answers": len(self.seconds),
            "statuses": {str(k): v for k, v in sorted(self.statuses.items())},
            "refused_p99": round(refused[int(0.99 * (len(refused) - 1))], 1) if refused else None,
        }


def chooser(mode: str, count: int, seed: int = 0) -> Callable[[], str]:
    """The next request's domain."""
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
    """HTTP/1.1 over connections that are kept; as many as are needed at once."""

    def __init__(self, address: str, images: list[bytes]) -> None:
        self.host, port = address.split(":")
        self.port, self.images = int(port), images
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.turn = itertools.count()

    async def ask(self, domain: str, seen: Seen, due: float | None = None) -> int:
        """One request, from when it was due (or now) to the last byte; its status."""
        start = time.perf_counter() if due is None else due
        body = self.images[next(self.turn) % len(self.images)]
        head = f"POST /v1/domains/{domain}/predict?top=1 HTTP/1.1\r\nHost: x\r\n"
        head += f"Content-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            async with self.connection() as (reader, writer):
                writer.write(head.encode() + body)
                said = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                status = int(said.split()[1])
                await reader.readexactly(int(said.split("content-length: ")[1].split()[0]))
        except (OSError, asyncio.IncompleteReadError):
            status = 0
        took = time.perf_counter() - start
        seen.statuses[status] += 1
        if status == 200:
            seen.seconds.append(took)
        elif status == 429:
            seen.refused.append(took)
        return status

    @contextlib.asynccontextmanager
    async def connection(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        pair = self.free.pop() if self.free else None
        if pair is None or pair[0].at_eof():  # the server closes what is idle for long
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
    """A fixed number of clients, each with one request under way; refused, it waits a little."""
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
    """Requests that come whether the server answers or not: Poisson, or in bursts of ten."""
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


def images() -> list[bytes]:
    """Real ones, as PNG."""
    found = []
    for x in load_sample("clipart").x_test[:16]:
        file = io.BytesIO()
        Image.fromarray(x.permute(1, 2, 0).numpy()).save(file, "PNG")
        found.append(file.getvalue())
    return found


# ── what is measured ─────────────────────────────────────────────────────────────────────────

SYSTEMS = {"mixed": "covnorm", "one-domain": "covnorm", "models": "fnft"}


def options(system: str, ecology: Ecology) -> list[str]:
    """Of the server: what fits into memory is four whole models, and a half more for room."""
    if system == "models":
        one = 4 * ecology.entry("d0").total
        return ["--resident", str((FITS + 0.5) * one / 1e6)]
    return ["--no-mixed"] if system == "one-domain" else []


async def measure(address: str, pid: int, count: int, mode: str, args: Any) -> dict[str, Any]:
    """Capacity, then latencies at 70 % of it, in bursts, and at three times it."""
    client = Client(address, images())
    choose = chooser(mode, count)
    await closed(client, choose, min(3.0, args.seconds), 16)  # warm: domains load
    tries = [{**(await closed(client, choose, args.seconds / 2, n)).row(), "clients": n}
             for n in CLIENTS]  # fmt: skip
    full = max(tries, key=lambda row: row["rate"])
    loads = {"closed": full}
    for name, share, bursty in (("steady", 0.7, False), ("bursty", 0.7, True), ("3x", 3.0, False)):
        seen = await opened(client, choose, args.seconds, max(1.0, share * full["rate"]), bursty)
        loads[name] = seen.row()
    client.close()
    return {"rate": full["rate"], "loads": loads, "memory": memory(pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 32, 256])
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    lines = Lines("serving", args.fresh)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as place:
        for count in args.counts:
            for system, method in SYSTEMS.items():
                modes = ("identical",) if count == 1 else MODES
                keys = [{"system": system, "domains": count, "mode": mode} for mode in modes]
                keys = [key for key in keys if not lines.find(**key)]
                few = {"models": (4, 32), "one-domain": (4, 32, 256)}.get(system, args.counts)
                if not keys or count not in few:
                    continue
                folder = Path(place) / f"{method}-{count}"
                ecology = Ecology(folder) if folder.exists() else make(folder, count, method)
                with server(folder, *options(system, ecology)) as (address, pid):
                    for key in keys:
                        found = asyncio.run(measure(address, pid, count, key["mode"], args))
                        lines.add({**key, **found})
                        print(*key.values(), found["rate"], found["memory"] // 10**6, flush=True)
    print(table(lines), goals(lines), sep="\n\n")


def table(lines: Lines) -> str:
    """Requests a second, by system, number of domains and mode."""
    out = ["| system | domains | mode | a second | p50 | p99 | at 3×: p99, refused | memory |"]
    out.append("|---" * 8 + "|")
    for r in lines.rows:
        steady, over = r["loads"]["steady"], r["loads"]["3x"]
        refused = over["statuses"].get("429", 0) / max(1, sum(over["statuses"].values()))
        cells = (r["system"], r["domains"], r["mode"], r["rate"], steady["p50"], steady["p99"])
        last = (f"{over['p99']}, {refused:.0%}", f"{r['memory'] / 1e6:.0f} MB")
        out.append("| " + " | ".join(str(c) for c in (*cells, *last)) + " |")
    return "\n".join(out)


def goals(lines: Lines) -> str:
    """What was to be reached, as ratios of one run."""

    def found(system: str, domains: int, mode: str) -> dict[str, Any]:
        return lines.find(system=system, domains=domains, mode=mode) or {}

    def ratio(a: dict[str, Any], b: dict[str, Any], field: str = "rate") -> str:
        return f"{a[field] / b[field]:.2f}" if a and b else "not run"

    many, one = found("mixed", 32, "uniform"), found("mixed", 32, "identical")
    said = [
        f"32 domains, uniform / one domain (goal 0.75): {ratio(many, one)}",
        f"… / one domain a batch: {ratio(many, found('one-domain', 32, 'uniform'))}",
        f"… / whole models, 4 of 32 fit (goal 5): {ratio(many, found('models', 32, 'uniform'))}",
        "memory, 256 domains / 1 (goal at most 1.3): "
        + ratio(found("mixed", 256, "distinct"), found("mixed", 1, "identical"), "memory"),
    ]
    if many:
        over = many["loads"]["3x"]
        said.append(
            f"at 3×: p99 of the answers {over['p99']:.0f} ms of {1000 * DEADLINE:.0f}, "
            f"statuses {over['statuses']}, p99 of the 429s {over['refused_p99']} ms"
        )
    return "\n".join(said)


if __name__ == "__main__":
    main()
