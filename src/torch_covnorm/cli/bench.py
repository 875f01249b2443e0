"""`bench`: what domains cost in time on this machine, as ratios inside one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from .options import Device, Json, Quiet, Threads, Where, check_device, find, set_threads
from .screen import Screen, table


def bench(
    batch: Annotated[int, typer.Option(min=1, help="Images a batch.")] = 32,
    pixels: Annotated[
        int | None,
        typer.Option(
            "--size", min=8, help="Side of the images; else the domains'.", show_default=False
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is measured.")] = 9,
    where: Where = None,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the bare backbone, one domain, it merged, and a batch of all domains mixed.

    Run it alone on the machine; OMP_WAIT_POLICY=PASSIVE in the environment helps.

    covnorm bench --batch 16
    """
    screen, ecology = Screen(json, quiet), find(where)
    set_threads(threads)
    names = list(ecology.domains)[:batch]
    if not names:
        raise CovNormError(f"{ecology.folder}: no domain to measure: covnorm add one")
    net = ecology.network().to(check_device(device))
    start = time.perf_counter()
    for name in names:
        ecology.load(net, name)
    loading = (time.perf_counter() - start) / len(names)
    side = pixels or ecology.record(names[0])["preprocessing"]["size"]
    runs = _runs(net, names, batch, side, device)
    with screen.reporting() as reporter:
        reporter.stage("bench", f"{', '.join(runs)}: in turn, {rounds} rounds")
        seconds = _measure(runs, rounds, reporter.images)
    value: dict[str, Any] = {
        "batch": batch,
        "size": side,
        "domains": len(names),
        "load_seconds": loading,
        "images_per_second": {k: batch / s for k, s in seconds.items()},
        "ratio_to_bare": {k: s / seconds["bare"] for k, s in seconds.items()},
    }
    rows = [(k, round(batch / s), f"{s / seconds['bare']:.2f}") for k, s in seconds.items()]
    screen.result(
        value,
        table("", ("", "images/s", "time / bare"), rows),
        f"loading a domain from the store: {1000 * loading:.1f} ms",
    )


def _runs(
    net: MultiDomainNetwork, names: list[str], batch: int, side: int, device: str
) -> dict[str, Callable[[], Any]]:
    x = torch.randn(batch, 3, side, side, device=device).contiguous(
        memory_format=torch.channels_last
    )
    mixed = [names[i % len(names)] for i in range(batch)]
    merged = net.eval().merge(names[0])
    return {
        "bare": lambda: net.backbone(x),
        "one domain": lambda: net(x, domain=names[0]),
        "merged": lambda: merged(x),
        f"mixed, {len(set(mixed))} domains": lambda: net(x, domain=mixed),
    }


@torch.no_grad()
def _measure(
    runs: dict[str, Callable[[], Any]], rounds: int, progress: Callable[[int, int], None]
) -> dict[str, float]:
    """The median of each one's times, in turn, so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_ >= 2:  # the first ones warm up
                times[name].append(time.perf_counter() - start)
        progress(round_ + 1, rounds + 2)
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}
