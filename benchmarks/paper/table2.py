"""Table 2, a mini-Decathlon: ResNet-26 pretrained here on objects, adapted to the other domains.

It is scored by the Decathlon's formula against our own fine-tuned networks. The score does not
compare with any leaderboard: other domains, other images, another pretraining. With the Decathlon's
archive it is tested on the val parts, pretrained on imagenet12 with our own short schedule.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch

from torch_covnorm.data import decathlon_score

from ..originals import Archive
from .bench import Bench
from .keys import cell
from .pretraining import origin as origin_of
from .pretraining import weights
from .rows import Rows

BASELINE = "fnft"
METHODS = ("fnft", "lwf", "ra", "dan", "piggyback", "covnorm")
OPTIONS: dict[str, dict[str, Any]] = {"covnorm": {"variance": 0.99}, "lwf": {"warm_up": 0}}


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int], methods: Iterable[str]) -> None:
    """Measure all cells; the source domain is the pretrained network itself."""
    names = [n for n in names if n != bench.origin]
    source(bench)
    for seed in seeds:
        for method in methods:
            for domain in names:
                bench.cell(method, domain, seed, **OPTIONS.get(method, {}))


def source(bench: Bench) -> dict[str, Any]:
    """Return the row of the pretrained network on the domain it was trained on."""
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


def score(accuracy: float, baseline: float, n: int) -> float:
    """Score a test accuracy in percent by the Decathlon's formula.

    The formula divides by the baseline's error: no error among n images counts as half an image.
    """
    most = 100 * (1 - 0.5 / n)
    scored = decathlon_score({"it": min(accuracy, most)}, baselines={"it": min(baseline, most)})
    return float(scored["total"])


def results(rows: Rows, archive: Archive | None = None) -> dict[str, Any]:
    """Return accuracy and points per domain, and scores, of the rows of one ResNet-26."""
    origin = origin_of(archive)
    domains = [d for d in rows.domains if d != origin]
    network = weights(archive)
    rows = Rows([r for r in rows.all if r.get("weights") == network], (*domains, origin))
    keys = {m: cell("resnet26", m, OPTIONS.get(m, {})) for m in METHODS}
    accuracy = {
        m: {d: statistics.fmean(v.values()) for d, v in rows.values(k).items()}
        for m, k in keys.items()
    }
    tested = {d: row["n"] for k in keys.values() for (d, _), row in rows.of(k).items()}
    fewest = min(tested, key=lambda d: tested[d], default="one")
    base, points, scores = accuracy[BASELINE], {}, {}
    for m, reached in accuracy.items():
        known = {d: score(a, base[d], tested[d]) for d, a in reached.items() if d in base}
        # One image of the smallest test part is worth hundreds of points: a score without it too.
        scored = (domains, [d for d in domains if d != fewest])
        scores[m] = [sum(known[d] for d in of) if known.keys() >= {*of} else None for of in scored]
        points[m] = known
    kept = rows.values(keys["lwf"], "forgetting", "after") if "lwf" in keys else {}
    return {
        **{"rows": rows, "keys": keys, "origin": origin, "domains": domains, "fewest": fewest},
        **{"accuracy": accuracy, "points": points, "scores": scores},
        "source": rows.of({"backbone": "resnet26", "method": "source"}).get((origin, 0)),
        "kept": [v for by_seed in kept.values() for v in by_seed.values()],
    }
