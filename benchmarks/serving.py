"""The server under load: mixed batches, one domain at a time, and an LRU cache of whole models.

    python -m benchmarks.serving [--fresh] [--seconds 4]

One generator sends requests over HTTP, in turn, to three servers that run side by side, each with
one compute thread: ours; ours with one domain per batch; and ours with one fine-tuned network per
domain (method fnft), of which four fit into memory (``--resident``). Domains are copies of one
under other names, which is the same work. Each row is appended to results/serving.jsonl.

Closed loops with 8, 16 and 32 clients measure the capacity: the median of five rounds, for the best
number of clients. Open loops, Poisson or in bursts of ten, measure latencies at 0.7 times and 3
times the capacity. The generator and the servers share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torch_covnorm as cn
from torch_covnorm.data import load_sample
from torch_covnorm.ecology import Ecology
from torch_covnorm.ecology.measure import png
from torch_covnorm.ecology.store import Details

from .ledger import Lines
from .load import MODES, Client, chooser, closed, opened

PIXELS, BATCH, DEADLINE = 64, 16, 2.0
FITS = 4  # whole models in memory


# ── ecologies ────────────────────────────────────────────────────────────────────────────────


def make(folder: Path, count: int, method: str) -> Ecology:
    """Create an ecology of equal domains: CovNorm at 1/8 of the adapters, or full copies."""
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
    prepared = {**ecology.backbone["preprocessing"], "size": PIXELS, "fit": "squash"}
    net.domain("first").preprocessing = prepared
    for i in range(count):
        net.copy_domain("first", f"d{i}")
        ecology.put(net, {f"d{i}": Details(unmeasured(method))})
        net.remove_domain(f"d{i}")
    return ecology


def unmeasured(method: str) -> dict[str, Any]:
    """Return the facts of a domain without measured accuracies."""
    accuracy = dict.fromkeys(("before", "adapted", "compressed", "final"))
    return {"method": method, "results": {"accuracy": accuracy}, "settings": {}, "history": []}


# ── servers ──────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Yield (address without scheme, pid) of a ready server, and stop it afterwards."""
    command = [sys.executable, "-m", "torch_covnorm", "serve", str(folder), "--port", "0", "--json"]
    command += ["--batch", str(BATCH), "--deadline", str(DEADLINE), "--threads", "1", *options]
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
    """Return the private memory (USS) of a server and its workers in bytes."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(_uss(int(p)) for p in [pid, *tasks])


def _uss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    values = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(values)


def images() -> list[bytes]:
    """Return real images as PNG."""
    return [png(x) for x in load_sample("clipart").x_test[:16]]


# ── what is measured ─────────────────────────────────────────────────────────────────────────

SYSTEMS = {  # {name: (method, numbers of domains)}
    "mixed": ("covnorm", (1, 4, 32, 256)),
    "one-domain": ("covnorm", (4, 32, 256)),
    "models": ("fnft", (4, 32)),
}
CLIENTS, ROUNDS = (8, 16, 32), 5  # of closed loops
OPEN = (("steady", 0.7, False), ("bursty", 0.7, True), ("3x", 3.0, False))  # share of capacity
OPENED = ("uniform", "skewed")


def options(system: str, ecology: Ecology) -> list[str]:
    """Return the server's options; for whole models, a memory limit that `FITS` of them meet."""
    if system == "models":
        one = 4 * ecology.entry("d0").total
        return ["--resident", str((FITS + 0.5) * one / 1e6)]
    return ["--no-mixed"] if system == "one-domain" else []


async def measure(
    servers: dict[str, tuple[str, int]], count: int, seconds: float
) -> list[dict[str, Any]]:
    """Return the rows of all systems and modes: capacity, then latencies under open loads.

    Capacities are measured in turn, so that all systems meet the same conditions.
    """
    clients = {system: Client(address, images()) for system, (address, _) in servers.items()}
    cells = [(system, mode) for mode in modes(count) for system in servers]
    chosen = {cell: chooser(cell[1], count) for cell in cells}
    for system, mode in cells:  # loads the domains
        await closed(clients[system], chosen[system, mode], 2.0, 16)
    rates: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for (system, mode), n in itertools.product(cells, CLIENTS):
            seen = await closed(clients[system], chosen[system, mode], 1.0, n)
            rates.setdefault((system, mode, n), []).append(seen.row()["rate"])
    rows = []
    for system, mode in cells:
        found = {n: statistics.median(rates[system, mode, n]) for n in CLIENTS}
        rate, loads = max(found.values()), {}
        for name, share, bursty in OPEN if mode in OPENED or count == 1 else ():
            load = clients[system], chosen[system, mode], seconds, max(1.0, share * rate), bursty
            loads[name] = (await opened(*load)).row()
        print(
            count, system, mode, f"{rate:.0f}", {k: v["p99"] for k, v in loads.items()}, flush=True
        )
        key = {"domains": count, "system": system, "mode": mode}
        rows.append({**key, "rate": rate, "by_clients": found, "loads": loads})
    for client in clients.values():
        client.close()
    used = {system: memory(pid) for system, (_, pid) in servers.items()}
    return [{**row, "memory": used[row["system"]]} for row in rows]


def modes(count: int) -> tuple[str, ...]:
    """Return the modes of popularity; with one domain they are all the same."""
    return MODES if count > 1 else MODES[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of an open loop")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 32, 256])
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    lines = Lines("serving", args.fresh)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for count in args.counts:
        if lines.find(domains=count):
            continue
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
            servers = {}
            for system, (method, counts) in SYSTEMS.items():
                if count not in counts:
                    continue
                folder = Path(place) / method
                ecology = Ecology(folder) if folder.exists() else make(folder, count, method)
                servers[system] = stack.enter_context(server(folder, *options(system, ecology)))
            for row in asyncio.run(measure(servers, count, args.seconds)):
                lines.add(row)
    print(table(lines), goals(lines), sep="\n\n")


def table(lines: Lines) -> str:
    """Format requests per second by system, number of domains and mode."""
    out = ["| domains | mode | system | per second | p50, p95, p99 ms | in bursts | memory |"]
    out.append("|---" * 7 + "|")
    for r in sorted(lines.rows, key=lambda r: (r["domains"], MODES.index(r["mode"]))):
        late = [
            ", ".join(f"{r['loads'][name][p] or 0:.0f}" for p in ("p50", "p95", "p99"))
            if r["loads"]
            else "–"
            for name in ("steady", "bursty")
        ]
        cells = (r["domains"], r["mode"], r["system"], f"{r['rate']:.0f}", *late)
        out.append("| " + " | ".join(map(str, cells)) + f" | {r['memory'] / 1e6:.0f} MB |")
    return "\n".join(out)


def goals(lines: Lines) -> str:
    """Format the goals, as ratios within one run."""

    def found(system: str, domains: int, mode: str) -> dict[str, Any]:
        return lines.find(system=system, domains=domains, mode=mode) or {}

    def ratio(a: dict[str, Any], b: dict[str, Any], field: str = "rate") -> str:
        return f"{a[field] / b[field]:.2f}" if a and b else "not run"

    many, one = found("mixed", 32, "uniform"), found("mixed", 32, "identical")
    report = [
        f"32 domains, uniform / one domain (goal 0.75): {ratio(many, one)}",
        f"… / one domain per batch: {ratio(many, found('one-domain', 32, 'uniform'))}",
        f"… / whole models, 4 of 32 fit (goal 5): {ratio(many, found('models', 32, 'uniform'))}",
        "memory, 256 domains / 1 (goal at most 1.3): "
        + ratio(found("mixed", 256, "distinct"), found("mixed", 1, "identical"), "memory"),
    ]
    for domains in (4, 32, 256):
        over = found("mixed", domains, "uniform").get("loads", {}).get("3x")
        if over:
            report.append(
                f"at 3×, {domains} domains: p99 {over['inside_p99']:.0f} ms of "
                f"{1000 * DEADLINE:.0f} in the server, {over['p99']:.0f} ms from the due time; "
                f"statuses {over['statuses']}; p99 of the 429s {over['refused_p99']} ms"
            )
    return "\n".join(report)


if __name__ == "__main__":
    main()
