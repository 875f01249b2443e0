"""The pieces of the benchmark, and a quick profile with two domains and the key methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import originals
from ..ledger import Lines
from . import again, dimensions, joint, metric, parameters, rates, smallest, table1, table2
from .bench import Bench
from .settings import LONGER, PIXELS

SEEDS = (0, 1, 2)
JOINT = SMALLEST = SEEDS[:1]  # expensive, and little depends on it
QUICK = ("ra", "bn", "fta", "svd-fta", "covnorm", "covnorm-joint")
PIECES = (
    *("rates", "table1", "trained", "dimensions", "parameters"),
    *("metric", "smallest", "joint", "table2", "again"),
)


def quick(lines: Lines, folder: Path | None = None) -> Bench:
    """Run one seed, two domains and the key methods: about ten minutes on 2 cores."""
    bench = Bench("vgg16", lines, folder)
    table1.run(bench, two(bench), [0], QUICK)
    return bench


def two(bench: Bench) -> tuple[str, ...]:
    """Return the two domains of the quick profile, the figure and the search of rates."""
    return rates.SEARCH if bench.folder is None else bench.domains[:2]


def full(folder: Path | None = None) -> tuple[str, ...]:
    """Return the pieces of the full profile: only Table 2 if the Decathlon is all there is."""
    alone = folder is not None and not originals.folders(folder) and originals.archive_in(folder)
    return ("table2",) if alone else PIECES


def piece(name: str, lines: Lines, folder: Path | None = None) -> None:
    """Run one piece of the full profile."""
    vgg, lite, small = (Bench(b, lines, folder) for b in PIXELS)
    methods = (*table1.SEVERAL, *table1.ONE)

    def rates_() -> None:
        if folder is not None:
            return  # the originals use the rates chosen on our domains
        for bench in (vgg, lite, small):
            rates.run(bench)
        for bench in (vgg, lite):
            metric.search(bench, rates.SEARCH)

    def table1_() -> None:
        rates.check(vgg, methods)
        table1.run(vgg, vgg.domains, SEEDS, table1.SEVERAL)
        table1.run(vgg, vgg.domains, SEEDS[:1], table1.ONE)

    def parameters_() -> None:
        rates.check(vgg, rates.kinds(vgg.backbone))
        parameters.run(vgg, two(vgg), SEEDS[:1])

    def trained() -> None:
        for domain in vgg.domains:  # a third more epochs: is RA trained well enough?
            vgg.cell("ra", domain, 0, epochs=LONGER)

    def metric_() -> None:
        for bench in (lite, vgg):
            rates.check(bench, ["ra"])
        for seed in SEEDS:
            for bench in (lite, vgg):
                metric.run(bench, bench.domains, [seed])

    def smallest_() -> None:  # on the command's default backbone
        rates.check(lite, ["ra"])
        smallest.run(lite, lite.domains, SMALLEST)

    def joint_() -> None:
        rates.check(lite, ["ra"])
        joint.run(lite, lite.domains, JOINT)

    def table2_() -> None:
        rates.check(small, table2.METHODS)
        table2.run(small, small.domains, SEEDS[:1], table2.METHODS)

    def again_() -> None:
        for bench in (vgg, lite):
            again.run(bench)

    runs: dict[str, Callable[[], None]] = {
        "rates": rates_,
        "table1": table1_,
        "trained": trained,
        "dimensions": lambda: dimensions.run(vgg, vgg.domains, SEEDS[:1]),
        "parameters": parameters_,
        "metric": metric_,
        "smallest": smallest_,
        "joint": joint_,
        "table2": table2_,
        "again": again_,
    }
    runs[name]()
