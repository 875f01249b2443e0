"""Which norms of the backbone a domain copies: none, those after a site, or all.

    python -m benchmarks.norms           # every cell; an interrupted run resumes
    python -m benchmarks.norms table     # docs/numbers.md, from benchmarks/results/norms.jsonl

RA, and CovNorm at 1/8 and 1/16 of RA's parameters (variance metric, tuned), on the seven domains of
the paper's benchmark with EfficientNet-Lite0 and three seeds. Each of the nine systems has a rate
of its own: with seed 0 it runs at every rate, and the one with the best mean validation accuracy is
used for all seeds. The statistics of the norms are the backbone's; a copy trains scale and shift.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch_covnorm as cn
from torch_covnorm.errors import CovNormError

from .fetch import cache
from .ledger import Lines
from .markers import filled
from .paper.bench import Bench
from .paper.compare import Values, deviation, over_seeds, paired
from .paper.page.numbers import NONE, signed

BACKBONE = "efficientnet-lite0"
NORMS = {"shared": "none (`shared`)", "sites": "those after a site (`sites`)", "own": "all (`own`)"}
SYSTEMS = {"ra": "RA", "1/8": "CovNorm 1/8", "1/16": "CovNorm 1/16"}
SEEDS, EPOCHS, TUNING = (0, 1, 2), 6, 3
RATES = {"ra": (3e-4, 1e-3, 3e-3), "1/8": (3e-4, 1e-3), "1/16": (3e-4, 1e-3)}
DOCS = Path(__file__).parents[1] / "docs" / "numbers.md"
BEGIN, END = "<!-- made by `python -m benchmarks.norms table` -->", "<!-- end of norms -->"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", default="run", choices=("run", "table"))
    options = parser.parse_args()
    lines = Lines("norms")
    if options.what == "run":
        run(Bench(BACKBONE, lines))
        return
    try:
        DOCS.write_text(render(DOCS.read_text(), lines.rows))
    except CovNormError as error:
        sys.exit(str(error))
    print(tables(lines.rows))


def run(bench: Bench) -> None:
    """Measure every cell: the search of the rates with seed 0, then the other seeds."""
    for seed in SEEDS:
        for system, norms in itertools.product(SYSTEMS, NORMS):
            rates = RATES[system]
            if seed:
                chosen = best_rate(bench.lines.rows, system, norms)
                assert chosen is not None
                rates = (chosen,)
            for domain, lr in itertools.product(bench.domains, rates):
                cell(bench, system, norms, domain, seed, lr)


def cell(bench: Bench, system: str, norms: str, domain: str, seed: int, lr: float) -> None:
    """Measure a cell that has no row yet."""
    key = {"system": system, "norms": norms, "domain": domain, "seed": seed, "lr": lr}
    if bench.lines.find(**key) is not None:
        return
    net, parts, start = bench.net, bench.parts(domain), time.perf_counter()
    shared: Row = {"seed": seed, "norm_statistics": "frozen", "norms": norms}
    shared |= {"training": "default", "statistics": parts["plain"], "progress": False}
    loaders = parts["train"], parts["val"]
    if system == "ra":
        classes = len(bench.data(domain).classes)
        done = cn.adapt(
            net, "cell", *loaders, "ra", classes=classes, epochs=EPOCHS, lr=lr, **shared
        )
        net.save_domain("cell", place(bench, norms, domain, seed, lr))
    else:
        trained = best_rate(bench.lines.rows, "ra", norms)
        assert trained is not None
        net.load_domain(place(bench, norms, domain, seed, trained), "trained")
        budget = net.num_parameters("trained")["adapter"] // int(system.removeprefix("1/"))
        tuning = {"epochs": TUNING, "lr": lr}
        done = cn.adapt(
            net,
            "cell",
            *loaders,
            "covnorm",
            start="trained",
            budget=budget,
            tuning=tuning,
            **shared,
        )
        net.remove_domain("trained")
    row = {
        **key,
        "method": "ra" if system == "ra" else "covnorm",
        "accuracy": cn.evaluate(net, "cell", parts["test"]).accuracy,
        "validation": done.accuracy,
        "declined": done.declined,
        **bench.sizes("cell"),
        "n": len(bench.data(domain).y_test),
        "seconds": round(time.perf_counter() - start, 1),
    }
    net.remove_domain("cell")
    bench.lines.add(row)
    print("…", *key.values(), f"{row['accuracy']:.1f}", f"{row['seconds']} s", flush=True)


def place(bench: Bench, norms: str, domain: str, seed: int, lr: float) -> Path:
    """Return the folder that keeps a trained A between runs."""
    name = f"{norms}-{domain}-{bench.images(domain)}-{seed}-{lr:g}-{EPOCHS}"
    return cache() / "norms" / BACKBONE / name


# ── results ──────────────────────────────────────────────────────────────────────────────────


def best_rate(rows: Sequence[Row], system: str, norms: str) -> float | None:
    """Return the rate with the best mean validation accuracy over the domains, with seed 0."""
    means = {}
    for lr in RATES[system]:
        found = [
            row["validation"]
            for row in rows
            if (row["system"], row["norms"], row["lr"], row["seed"]) == (system, norms, lr, 0)
        ]
        if found:
            means[lr] = statistics.fmean(found)
    return max(means, key=lambda lr: means[lr]) if means else None


def values(rows: Sequence[Row], system: str, norms: str) -> dict[str, dict[int, float]]:
    """Return {domain: {seed: accuracy}} of a system at its best rate."""
    found: dict[str, dict[int, float]] = {}
    lr = best_rate(rows, system, norms)
    for row in rows:
        if (row["system"], row["norms"], row["lr"]) == (system, norms, lr):
            found.setdefault(row["domain"], {})[row["seed"]] = row["accuracy"]
    return found


def render(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the tables of these rows between its markers."""
    return filled(page, BEGIN, END, tables(rows))


def tables(rows: Sequence[Row]) -> str:
    """Return the table of means and the table of differences, as Markdown."""
    names = sorted({row["domain"] for row in rows})
    head = ["norms that a domain copies", *SYSTEMS.values(), "kB of CovNorm 1/16, float32"]
    means = [head, ["---"] * len(head)]
    for norms, title in NORMS.items():
        of = [_mean(values(rows, system, norms), names) for system in SYSTEMS]
        sizes = [r["bytes"] for r in rows if (r["system"], r["norms"]) == ("1/16", norms)]
        size = f"{statistics.fmean(sizes) / 1000:.0f}" if sizes else NONE
        rates = (best_rate(rows, system, norms) for system in SYSTEMS)
        cells = (f"{m} ({r:g})" if r else m for m, r in zip(of, rates, strict=True))
        means.append([title, *cells, size])
    head = ["difference (95 % interval)", *SYSTEMS.values()]
    gaps = [head, ["---"] * len(head)]
    for one, other in (("shared", "own"), ("shared", "sites"), ("sites", "own")):
        cells = (_gap(values(rows, s, one), values(rows, s, other), names) for s in SYSTEMS)
        gaps.append([f"`{one}` − `{other}`", *cells])
    return "\n\n".join("\n".join(f"| {' | '.join(r)} |" for r in t) for t in (means, gaps))


def _mean(found: Values, names: Sequence[str]) -> str:
    seeds = over_seeds(found, names)
    if not seeds:
        return NONE
    off = deviation(seeds)
    return f"{statistics.fmean(seeds):.1f}" + (f" ± {off:.1f}" if off is not None else "")


def _gap(a: Values, b: Values, names: Sequence[str]) -> str:
    found = paired(a, b, names)
    if found is None:
        return NONE
    return f"{signed(found.mean)} ({signed(found.low)} to {signed(found.high)})"


if __name__ == "__main__":
    main()
