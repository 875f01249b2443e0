"""`bench`: the speed of domains on this machine, relative to the bare backbone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from ..errors import CovNormError
from .options import Compute
from .screen import table


def bench(
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 32,
    pixels: Annotated[
        int | None, typer.Option("--size", min=8, help="Side in pixels. Default: the domains'.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of each.")] = 9,
    *,
    common: Compute,
) -> None:
    """Measure the speed of the backbone, of one domain, merged or not, and of a mixed batch.

    Run it with nothing else running on the machine. Setting OMP_WAIT_POLICY=PASSIVE helps.

    covnorm bench --batch 16
    """
    screen, ecology = common.screen, common.ecology
    names = list(ecology.domains)[:batch]
    if not names:
        raise CovNormError(f"{ecology.folder}: no domain to measure. Add one with covnorm add.")
    net = ecology.network().to(common.device)
    start = time.perf_counter()
    for name in names:
        ecology.load(net, name)
    loading = (time.perf_counter() - start) / len(names)
    side = pixels or ecology.record(names[0])["preprocessing"]["size"]
    x = torch.randn(batch, 3, side, side, device=common.device)
    x = x.contiguous(memory_format=torch.channels_last)
    mixed = [names[i % len(names)] for i in range(batch)]
    merged = net.eval().merge(names[0])
    runs = {
        "bare": lambda: net.backbone(x),
        "one domain": lambda: net(x, domain=names[0]),
        "merged": lambda: merged(x),
        f"mixed, {len(names)} domains": lambda: net(x, domain=mixed),
    }
    with screen.reporting() as reporter:
        reporter.stage("bench", f"{', '.join(runs)}: {rounds} rounds, interleaved")
        seconds = _measure(runs, rounds, reporter.images)
    value = {
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
        table("", ("", "images/s", "time relative to bare"), rows),
        f"loading a domain from the ecology takes {1000 * loading:.1f} ms",
    )


@torch.no_grad()
def _measure(
    runs: dict[str, Callable[[], Any]], rounds: int, progress: Callable[[int, int], None]
) -> dict[str, float]:
    """Return the median time of each, interleaved so that all run under the same load."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_ >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - start)
        progress(round_ + 1, rounds + 2)
    return {name: statistics.median_high(values) for name, values in times.items()}
