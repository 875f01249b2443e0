"""With few images: one training run, or the mean of three runs of half as many epochs.

    python -m benchmarks.few           # every cell; an interrupted run resumes
    python -m benchmarks.few table     # docs/numbers.md, from benchmarks/results/few.jsonl

RA with the settings of `covnorm add` on the seven domains of the paper's benchmark, none of which
is in `benchmarks.strangers`: EfficientNet-Lite0 at 64 px, the first five classes (four of solar,
twenty of faces), 20 training images per class (5 of faces). Each seed draws other images. Of the
other images of these classes, at most 400 are for testing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_covnorm as cn
from torch_covnorm.data.images import prepare
from torch_covnorm.data.loader import Batches
from torch_covnorm.training.auto import epochs_for

from . import domains
from .ledger import Lines
from .markers import filled
from .paper.compare import Values, paired
from .paper.page.numbers import signed

BACKBONE, PIXELS, BATCH, TEST = "efficientnet-lite0", 64, 32, 400
SEEDS, RUNS = (0, 1), (1, 3)
CLASSES, PER_CLASS = {"solar": 4, "faces": 20}, {"faces": 5}  # otherwise 5 and 20
DOCS = Path(__file__).parents[1] / "docs" / "numbers.md"
BEGIN, END = "<!-- made by `python -m benchmarks.few table` -->", "<!-- end of few -->"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", default="run", choices=("run", "table"))
    lines = Lines("few")
    if parser.parse_args().what == "table":
        DOCS.write_text(filled(DOCS.read_text(), BEGIN, END, table(lines.rows)))
        print(table(lines.rows))
        return
    net = cn.MultiDomainNetwork(cn.load_backbone(BACKBONE))
    for seed in SEEDS:
        for domain in domains.DOMAINS:
            for runs in RUNS:
                cell(net, lines, domain, seed, runs)


def cell(net: cn.MultiDomainNetwork, lines: Lines, domain: str, seed: int, runs: int) -> None:
    """Measure a cell that has no row yet."""
    key = {"method": "ra", "domain": domain, "seed": seed, "runs": runs}
    if lines.find(**key) is not None:
        return
    train, test = parts(domain, seed)
    count, start = len(train[1]), time.perf_counter()
    epochs = epochs_for(count)
    done = cn.adapt(
        net,
        "cell",
        batches(net, *train, shuffle=True),
        method="ra",
        classes=CLASSES.get(domain, 5),
        training=cn.Training("auto", runs=runs, seed=seed),
        epochs=epochs if runs == 1 else -(-epochs // 2),
        statistics=batches(net, *train),
        test=batches(net, *test),
        progress=False,
    )
    seconds, size = time.perf_counter() - start, net.num_parameters("cell")
    net.remove_domain("cell")
    row = {
        **key,
        "accuracy": done.tested["final"],
        "linear": done.tested["linear"],
        "n": len(test[1]),
        "parameters": size["adapter"],
        "bytes": 4 * size["total"],
        "seconds": round(seconds, 1),
    }
    lines.add(row)
    print(*key.values(), f"{row['accuracy']:.1f} %, linear head {row['linear']:.1f} %", flush=True)


def parts(domain: str, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the images (n, 3, h, w) and labels (n,) for training and for testing."""
    split = domains.load(domain)
    x = torch.cat([split.x_train, split.x_val, split.x_test])
    y = torch.cat([split.y_train, split.y_val, split.y_test])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    train, test = [], []
    for label in range(CLASSES.get(domain, 5)):
        found = order[y[order] == label]
        train.append(found[: PER_CLASS.get(domain, 20)])
        test.append(found[PER_CLASS.get(domain, 20) :])
    held = torch.cat(test)
    held = held[torch.randperm(len(held), generator=generator)[:TEST]]
    chosen = torch.cat(train)
    return (x[chosen], y[chosen]), (x[held], y[held])


def batches(net: cn.MultiDomainNetwork, x: Tensor, y: Tensor, shuffle: bool = False) -> Batches:
    """Return a loader of images at 64 px."""
    about: Any = net.backbone.preprocessing
    pixels = (255 * prepare(x, PIXELS, 0.0, 1.0)).round().clamp(0, 255).byte()
    return Batches(pixels, y, about, BATCH, shuffle)


def values(rows: list[Row], runs: int | None) -> Values:
    """Return {domain: {seed: accuracy}} with so many runs; of the linear head for None."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["runs"] == (runs or RUNS[0]):
            accuracy = row["linear"] if runs is None else row["accuracy"]
            found.setdefault(row["domain"], {})[row["seed"]] = accuracy
    return found


def table(rows: list[Row]) -> str:
    """Return the table of means as Markdown, with the gain of three runs over one."""
    names = [name for name in domains.DOMAINS if any(row["domain"] == name for row in rows)]
    lines = [["test accuracy %", *names, "mean", "seconds"]]
    lines.append(["---"] * len(lines[0]))
    titles = {None: "linear head", 1: "one run", 3: "mean of three, half of the epochs each"}
    for runs, title in titles.items():
        found = values(rows, runs)
        means = [statistics.fmean(found[name].values()) for name in names]
        taken = [row["seconds"] for row in rows if row["runs"] == runs]
        cells = [f"{m:.1f}" for m in (*means, statistics.fmean(means))]
        lines.append([title, *cells, f"{statistics.fmean(taken):.0f}" if taken else "–"])
    gap = paired(values(rows, 3), values(rows, 1), names)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    assert gap is not None
    interval = f"{signed(gap.mean)} (95 % interval {signed(gap.low)} to {signed(gap.high)})"
    below = {n: sum(r["accuracy"] < r["linear"] for r in rows if r["runs"] == n) for n in RUNS}
    return (
        f"{table}\n\nThe mean of three runs is {interval} points above one run. One run ended "
        f"below the linear head in {below[1]} of {len(rows) // 2} cells, the mean of three in "
        f"{below[3]}."
    )


if __name__ == "__main__":
    main()
