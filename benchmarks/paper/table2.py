"""Table 2 in small, a mini-Decathlon: ResNet-26 pre-trained here on objects, adapted to the others.

Scored by the Decathlon's formula against our own fine-tuned networks. It is no Decathlon score and
compares with no leaderboard: other domains, other images, another pre-training. From a folder with
the Decathlon's archive it is that on its val parts, pre-trained on imagenet12 by our own short
schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_covnorm.data import decathlon_score

from .bench import Bench

BASELINE = "fnft"
METHODS = ("fnft", "lwf", "ra", "dan", "piggyback", "covnorm")
OPTIONS: dict[str, dict[str, Any]] = {"covnorm": {"variance": 0.99}, "lwf": {"warm_up": 0}}


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int], methods: Iterable[str]) -> None:
    """All cells; the source domain is the network itself, as it was pre-trained."""
    names = [n for n in names if n != bench.origin]
    source(bench)
    for seed in seeds:
        for method in methods:
            for domain in names:
                bench.cell(method, domain, seed, **OPTIONS.get(method, {}))


def source(bench: Bench) -> dict[str, Any]:
    """The row of the pre-trained network on its own domain."""
    key = {**bench.where(bench.origin, 0), "method": "source"}
    found = bench.lines.find(**key)
    if found is None:
        net, right, seen = bench.net.backbone.eval(), 0, 0
        with torch.inference_mode():
            for x, y in bench.parts(bench.origin)["test"]:
                right, seen = right + int((net(x).argmax(1) == y).sum()), seen + len(y)
        numbers = sum(p.numel() for p in net.parameters())
        row = {
            "accuracy": 100 * right / seen,
            "parameters": 0,
            "total": numbers,
            "bytes": 4 * numbers,
        }
        found = bench.lines.add({**key, **row, "seconds": 0.0})
    return found


def score(accuracies: dict[str, float], baselines: dict[str, float]) -> dict[str, Any]:
    """``{"total", "points"}`` of test accuracies in percent."""
    return decathlon_score(accuracies, baselines=baselines)
