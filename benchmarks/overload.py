"""Check that an overloaded server keeps the deadline of every request it accepts.

    python -m benchmarks.overload [--seconds 4]

The capacity is measured first, in a closed loop, and three times as much is then sent. It prints
each condition with its figure and exits with 1 if one does not hold. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path

from .load import Client, Seen, chooser, closed, opened
from .serving import DEADLINE, images, make, server

DOMAINS, TIMES = 2, 3


async def overloaded(address: str, seconds: float) -> tuple[float, Seen]:
    """Return the capacity in images per second, and what a load of three times that got."""
    client, choose = Client(address, images()), chooser("uniform", DOMAINS)
    try:
        await closed(client, choose, 1.0, 4)  # loads the domains
        capacity = len((await closed(client, choose, seconds, 16)).seconds) / seconds
        return capacity, await opened(client, choose, seconds, TIMES * capacity)
    finally:
        client.close()


def conditions(capacity: float, seen: Seen) -> dict[str, tuple[float, bool]]:
    """Return {condition: (figure, whether it holds)}."""
    accepted, late, refused = (seen.statuses[status] for status in (200, 504, 429))
    offered = sum(seen.statuses.values())
    slowest = statistics.quantiles(seen.inside, n=100)[98]
    waited = statistics.median(seen.refused) if seen.refused else 0.0
    worked = accepted / seen.lasted / capacity
    return {
        "offered load / capacity, above 2": (
            offered / seen.lasted / capacity,
            offered > 2 * capacity * seen.lasted,
        ),
        "late answers (504), at most 1 % of the accepted": (
            late / max(accepted + late, 1),
            late <= 0.01 * (accepted + late),
        ),
        "other statuses than 200, 429, 504: none": (
            offered - accepted - late - refused,
            offered == accepted + late + refused,
        ),
        "refused at once (429), above 30 %": (refused / offered, refused > 0.3 * offered),
        f"p99 in the server, at most {DEADLINE:g} s": (slowest, slowest <= DEADLINE),
        "answered / capacity, above 0.3": (worked, worked > 0.3),
        f"median of the 429s, below {DEADLINE / 2:g} s": (waited, waited < 0.5 * DEADLINE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        ecology = make(Path(folder) / "house", DOMAINS, "covnorm")
        with server(ecology.folder, "--queue", "5000") as (address, _):
            found = conditions(*asyncio.run(overloaded(address, seconds)))
            with urllib.request.urlopen(f"http://{address}/ready") as answer:
                found["ready afterwards"] = (answer.status, answer.status == 200)
    for condition, (figure, holds) in found.items():
        print(f"{'holds ' if holds else 'BROKEN'} {condition}: {figure:.3g}")
    sys.exit(0 if all(holds for _, holds in found.values()) else 1)


if __name__ == "__main__":
    main()
