"""Rows as the paper benchmark writes them, made up, for the tests of its page."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks.domains import DOMAINS, SIZES
from benchmarks.paper import joint, metric, parameters, settings, smallest, table1, table2
from benchmarks.paper.keys import cell, cut, longer, shared, start
from benchmarks.paper.page import render
from benchmarks.paper.page.verdicts import claims
from benchmarks.paper.pretraining import weights
from benchmarks.paper.published import TABLE1
from benchmarks.paper.rows import Rows

RA, NETWORK = 1_000_000, 10_000_000
SIZE_OF = {"ra": 1.0, "fnft": 10.0, "lwf": 10.0, "bn": 0.0, "parallel": 5.0, "dan": 1.0}
LEVELS = dict(zip(DOMAINS, (62, 84, 95, 80, 58, 71, 90), strict=True))


def noise(*of: Any) -> float:
    """In [-0.5, 0.5), the same on every machine."""
    value = sum((i + 1) * ord(c) for i, c in enumerate(repr(of)))
    return (value * 2_654_435_761 % 2**32) / 2**32 - 0.5


def row(key: dict, domain: str, seed: int, accuracy: float, size: float, **more: Any) -> dict:
    """A line of the file."""
    where = {"domain": domain, "images": f"of-{domain}", "seed": seed}
    accuracy = round(accuracy, 1)
    measured = {
        "accuracy": accuracy,
        "validation": round(accuracy + noise(domain, seed, "val"), 1),
        "tested": {"train": accuracy, "normalize": accuracy - 5, "final": accuracy},
        "parameters": round(size * RA),
        "total": round(size * RA) + 20_000,
        "bytes": round(4 * size * RA),
        "shared": 0,
        "of_ra": size,
        "of_network": size * RA / NETWORK,
        "n": SIZES[domain][1][-1] if domain in SIZES else 100,
        "seconds": 1.0,
    }
    net = {"weights": weights()} if key["backbone"] == "resnet26" else {}
    return {**key, **where, **net, **measured, **more}


def sized(method: str, options: dict) -> float:
    if "variance" in options:
        return 0.35 * (1 - options["variance"]) ** -0.25 * 0.1
    return 2 * (options.get("rank") or options.get("ratio") or SIZE_OF.get(method, 0.25))


def made_up() -> list[dict]:
    """Every row of the full profile."""
    rows = []

    def add(key: dict, domain: str, seed: int, gain: float, size: float, **more: Any) -> None:
        value = min(100.0, LEVELS[domain] + gain + noise(key, domain, seed))
        rows.append(row(key, domain, seed, value, size, **more))

    order = sorted(TABLE1, key=lambda m: -TABLE1[m][1])
    for method in (*table1.SEVERAL, *table1.ONE):
        options = table1.options(method, len(DOMAINS))
        key = cell("vgg16", method, options)
        gain = 1 - 2 * order.index(method) if method in order else -5
        size = SIZE_OF.get(method, sized(method, options) if options else 0.5)
        parts = {"shared": 70_000} if "joint" in method else {}
        for domain in DOMAINS:
            for seed in range(3 if method in table1.SEVERAL else 1):
                add(key, domain, seed, gain, size / 2 if parts else size, **parts)
    for domain in DOMAINS:
        add(longer("vgg16"), domain, 0, 1 - 2 * order.index("ra"), 1.0)
        for backbone in ("vgg16", "efficientnet-lite0"):
            for method, options in (("ra", {}), ("covnorm", {"variance": 0.99})):
                used = settings.rate(backbone, method)
                for lr in {*settings.rates(backbone, method)} - {used}:
                    key = cell(backbone, method, options, lr=lr)
                    add(start(backbone, lr) if method == "ra" else key, domain, 0, -9.0, 0.12)
            for seed in range(3):
                add(start(backbone), domain, seed, 0.0, 1.0)
    there = [(r["method"], r["options"], r["domain"], r["seed"]) for r in rows]
    for method, options in parameters.cells():
        for domain in parameters.DOMAINS:
            if (method, options, domain, 0) not in there:
                size = sized(method, options)
                begun = {"random": -12, "identity": -9}.get(options.get("M"), 0)
                gain = 3.0 * math.log2(max(size, 0.01)) / 2 + begun + (method == "covnorm")
                add(cell("vgg16", method, options), domain, 0, gain, size)
    for backbone in ("vgg16", "efficientnet-lite0"):
        for way, share, tuned in metric.planned(0):
            gain = -math.log2(share) * (1.0 if way == "loss" else 1.8) + 4 * tuned
            for domain in DOMAINS:
                for seed in range(3):
                    add(cut(backbone, way, share, tuned), domain, seed, gain, 1 / share)
        for way in smallest.METRICS:
            key, dtype = cell(backbone, "covnorm", smallest.options(way)), "int8"
            for domain in DOMAINS:
                for seed in range(3):
                    add(key, domain, seed, 0.0, 0.1 if way == "loss" else 0.2, dtype=dtype)
    for ratio in joint.RATIOS:
        for way in joint.WAYS:
            for tuned in (False, True):
                key = shared("efficientnet-lite0", way, ratio, len(DOMAINS), tuned)
                for domain in DOMAINS:
                    add(key, domain, 0, 3 * tuned - 5, ratio**2, shared=70_000)
    for method in table2.METHODS:
        for domain in DOMAINS[1:]:
            key = cell("resnet26", method, table2.OPTIONS.get(method, {}))
            add(key, domain, 0, -10 + 5 * noise(method), SIZE_OF.get(method, 0.2))
    rows.append(row({"backbone": "resnet26", "method": "source"}, "objects", 0, 77.7, 0))
    sites = [f"features.{i}" for i in range(13)]
    for domain in DOMAINS:
        ranks = {
            t: {s: (60, round(55 - 3 * i + 4 * noise(domain, i))) for i, s in enumerate(sites)}
            for t in ("0.9", "0.95", "0.99")
        }
        shares = [(j + 1) / 64 for j in range(64)]
        powers = {"x": 0.15, "y": 0.25, "A": 0.6}
        explained = {s: {k: [v**p for v in shares] for k, p in powers.items()} for s in sites}
        key = {"backbone": "vgg16", "method": "spectra"}
        rows.append(row(key, domain, 0, 0, 1, ranks=ranks, explained=explained))
    return json.loads(json.dumps(rows))


@functools.cache
def full() -> dict[str, str]:
    """The files of all made-up rows, made once."""
    return render(made_up())


def verdict_of(rows: list[dict], key: str) -> str:
    return claims(Rows(rows))[key].verdict


def cells_of(markdown: str, name: str) -> list[str]:
    line = next(x for x in markdown.splitlines() if x.startswith(f"| {name} |"))
    return [part.strip() for part in line.strip("|").split("|")]
