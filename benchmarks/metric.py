"""Variance or loss: accuracy against adapter parameters, on the four sample domains.

    python -m benchmarks.metric [--seeds 0 1 2] [--fresh]

EfficientNet-Lite0 at 64 px. Residual adapters are trained once a domain and seed, then compressed
to 1/8, 1/16 and 1/32 of their parameters by each metric with one budget, as they are and tuned for
three epochs. Every row goes to results/metric.jsonl as it comes; what is there is not run again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import torch_covnorm as cn
from torch_covnorm.data import SAMPLES, load_sample, prepare
from torch_covnorm.data.loader import Batches

from .ledger import Lines

PIXELS = 64
SHARES = (8, 16, 32)
TRAINING: dict[str, Any] = {"epochs": 6, "norms": "frozen"}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


def loaders(name: str, how: dict[str, Any]) -> dict[str, Batches]:
    sample = load_sample(name)

    def sized(images: torch.Tensor) -> torch.Tensor:
        return prepare(images, PIXELS, 0.0, 1 / 255).round().to(torch.uint8)

    x, y = sized(sample.x_train), sample.y_train
    return {
        "train": Batches(x[150:], y[150:], how, 32, shuffle=True),
        "plain": Batches(x[150:], y[150:], how, 64),
        "val": Batches(x[:150], y[:150], how, 64),
        "test": Batches(sized(sample.x_test), sample.y_test, how, 64),
    }


def run(net: cn.MultiDomainNetwork, domain: str, seed: int, lines: Lines) -> None:
    """All rows of one domain and seed."""
    parts = loaders(domain, net.backbone.preprocessing)
    wanted = [(m, s, t) for m in ("variance", "loss") for s in SHARES for t in (False, True)]
    keys = [{"metric": m, "share": s, "tuned": t} for m, s, t in wanted]
    if all(lines.find(domain=domain, seed=seed, **key) for key in keys):
        return
    data = (parts["train"], parts["val"])
    given = {"statistics": parts["plain"], "test": parts["test"], "seed": seed, **TRAINING}
    classes = len(load_sample(domain).classes)
    start = time.perf_counter()
    found = cn.adapt(net, "ra", *data, method="ra", classes=classes, **given)
    base = {"method": "covnorm", "domain": domain, "seed": seed}
    whole = net.num_parameters("ra")["adapter"]
    if not lines.find(domain=domain, seed=seed, metric="ra"):
        seconds = time.perf_counter() - start
        row = {"metric": "ra", "share": 1, "tuned": True, "accuracy": found.tested["final"]}
        lines.add({**base, "method": "ra", **row, **cost(net, "ra"), "seconds": round(seconds, 1)})
    moments = cn.collect(net, "ra", parts["plain"])
    gradients = cn.collect_gradients(net, "ra", parts["plain"], seed=seed)
    for key in keys:
        if lines.find(domain=domain, seed=seed, **key):
            continue
        start, budget = time.perf_counter(), whole // key["share"]
        felt = {"metric": "loss", "gradients": gradients} if key["metric"] == "loss" else {}
        net.copy_domain("ra", "small")
        cn.normalize_(net, "small", moments, budget=budget, **felt)
        if key["tuned"]:
            tuning = {"epochs": 3, "lr": 1e-3, "norms": "frozen", "seed": seed}
            cn.fit(net, "small", *data, **tuning)
        cn.absorb_(net, "small")
        accuracy = cn.evaluate(net, "small", parts["test"]).accuracy
        seconds = round(time.perf_counter() - start, 1)
        row = {**base, **key, "accuracy": accuracy, **cost(net, "small"), "seconds": seconds}
        print(lines.add(row), flush=True)
        net.remove_domain("small")
    net.remove_domain("ra")


def cost(net: cn.MultiDomainNetwork, name: str) -> dict[str, int]:
    from torch_covnorm.ecology.measure import stored_bytes

    sizes = {f"bytes_{k}": stored_bytes(net, name, dtype) for k, dtype in DTYPES.items()}
    return {
        "parameters": net.num_parameters(name)["adapter"],
        "bytes": sizes["bytes_float16"],
        **sizes,
    }


def table(lines: Lines) -> str:
    """Means over the domains and seeds that have every row, with the standard error."""
    text = ["| of RA's parameters | metric | not tuned | tuned |", "|---|---|---|---|"]
    ra = [r["accuracy"] for r in lines.rows if r["metric"] == "ra"]
    text.append(f"| 1 | RA | – | {statistics.mean(ra):.1f} ({len(ra)} runs) |")
    for share in SHARES:
        for metric in ("variance", "loss"):
            cells = []
            for tuned in (False, True):
                rows = [
                    r["accuracy"]
                    for r in lines.rows
                    if (r["metric"], r["share"], r["tuned"]) == (metric, share, tuned)
                ]
                cells.append(f"{statistics.mean(rows):.1f}" if rows else "–")
            text.append(f"| 1/{share} | {metric} | {cells[0]} | {cells[1]} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    lines = Lines("metric", args.fresh)
    backbone = cn.load_backbone("efficientnet-lite0")
    net = cn.MultiDomainNetwork(backbone.to(memory_format=torch.channels_last))
    for seed in args.seeds:
        for domain in SAMPLES:
            run(net, domain, seed, lines)
    print(table(lines))


if __name__ == "__main__":
    main()
