"""Variance or loss: accuracy against adapter parameters, for each metric and its neighbours.

Residual adapters are trained once per domain and seed, then cut to 1/8, 1/16 and 1/32 of their
parameters: by CovNorm with one threshold t (the paper), by CovNorm with one budget in the variance
metric (the PCA of y) or the loss metric, and by the neighbours. All are measured without tuning;
the two metrics and SVD with one budget are also tuned. The two metrics, and SVD with one budget
without tuning, have three seeds; the rest has one.

The gradients come from the validation images. On its training images a network is so certain that
almost all gradients vanish and G is noise: "loss-train" shows what that costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from .bench import Bench
from .compare import Comparison, error, over_seeds, paired
from .keys import cut
from .neighbours import CUTS, Trained, apply_, one_threshold
from .rows import Rows
from .settings import TUNING, rates

BACKBONES = ("vgg16", "efficientnet-lite0")
SHARES = (8, 16, 32)
METRICS = ("variance", "loss")
WAYS = {  # {way to cut an A: its name in tables}
    "threshold": "CovNorm, one threshold (the paper)",
    "variance": "CovNorm, one budget, variance metric",
    "loss": "CovNorm, one budget, loss metric",
    "loss-train": "the same, gradients of the training images",
    "svd": "SVD, one ratio",
    "svd-greedy": "SVD, one budget",
    "svd-loss-ranks": "SVD, ranks of the loss metric",
    "svd-scaled": "SVD of scaled A (after ASVD), one budget",
}
TUNED = (*METRICS, "svd-greedy")
SEVERAL = {False: TUNED, True: METRICS}  # {tuned: ways measured with every seed}
ONE = {False: tuple(WAYS), True: TUNED}  # with the first seed


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """Measure all cuts of these domains and seeds."""
    for seed in seeds:
        for domain in names:
            _run(bench, domain, seed, keys(bench, domain, seed))


def search(bench: Bench, names: Iterable[str]) -> None:
    """Measure the tuned ways at every rate, as `rates.run` does for the methods."""
    for domain in names:
        tuned = [key for key in keys(bench, domain, 0) if key["tuned"]]
        tried = [{**k, "lr": r} for k in tuned for r in rates(bench.backbone, f"cut-{k['way']}")]
        _run(bench, domain, 0, tried)


def planned(seed: int) -> list[tuple[str, int, bool]]:
    """Return (way, share, tuned) of every cut of a domain with this seed."""
    ways = SEVERAL if seed else ONE
    return [(w, s, t) for s in SHARES for w in WAYS for t in (False, True) if w in ways[t]]


def count(seeds: Iterable[int]) -> int:
    """Return how many cuts a domain has with these seeds."""
    return sum(len(planned(seed)) for seed in seeds)


def cut_keys(backbone: str) -> list[dict[str, Any]]:
    """Return the keys of all cuts."""
    return [cut(backbone, *way) for way in planned(0)]


def keys(bench: Bench, domain: str, seed: int) -> list[dict[str, Any]]:
    """Return the keys of all rows of one domain and seed."""
    where = bench.where(domain, seed)
    return [where | cut(bench.backbone, *way) for way in planned(seed)]


def _run(bench: Bench, domain: str, seed: int, wanted: Iterable[dict[str, Any]]) -> None:
    missing = [key for key in wanted if not bench.lines.find(**key)]
    if not missing:
        return
    name, parts, net = bench.trained(domain, seed), bench.parts(domain), bench.net
    moments = cn.collect(net, name, parts["plain"])
    trained = {
        part: Trained(net, name, moments, cn.collect_gradients(net, name, parts[part], seed=seed))
        for part in ("val", "plain")
    }
    for key in missing:
        start = time.perf_counter()
        net.copy_domain(name, "cut")
        seen = trained["plain" if key["way"] == "loss-train" else "val"]
        cut_(seen, "cut", key["way"].removesuffix("-train"), key["share"])
        if key["tuned"]:
            tuning = {"epochs": TUNING, "lr": key["lr"], "seed": seed}
            tuning |= {"norm_statistics": "frozen"}
            cn.fit(net, "cut", parts["train"], parts["val"], progress=False, **tuning)
        if key["way"] not in CUTS:
            cn.absorb_(net, "cut")
        row = {
            **key,
            **bench.start(name),
            "accuracy": cn.evaluate(net, "cut", parts["test"]).accuracy,
            "validation": cn.evaluate(net, "cut", parts["val"]).accuracy,
            **bench.sizes("cut"),
        }
        net.remove_domain("cut")
        bench.lines.add({**row, "seconds": round(time.perf_counter() - start, 1)})
        print("…", *key.values(), f"{row['accuracy']:.1f}", flush=True)


def cut_(trained: Trained, name: str, way: str, share: int) -> None:
    """Cut a copy of a trained domain to 1/share of its adapter parameters."""
    net, moments = trained.net, trained.moments
    budget = net.num_parameters(trained.name)["adapter"] // share
    if way == "threshold":
        cn.normalize_(net, name, moments, one_threshold(trained, budget))
    elif way == "variance":
        cn.normalize_(net, name, moments, budget=budget)
    elif way == "loss":
        gradients = trained.gradients
        cn.normalize_(net, name, moments, budget=budget, metric="loss", gradients=gradients)
    else:
        apply_(net, name, CUTS[way](trained, budget))


# ── results ──────────────────────────────────────────────────────────────────────────────────


def whole_domains(rows: Rows, backbone: str) -> list[str]:
    """Return the domains with every cut that is planned for all seeds: means are over these."""
    places = [set(rows.of(cut(backbone, *way))) for way in planned(1)]
    whole = set.intersection(*places)
    first = min((seed for _, seed in whole), default=0)
    return [d for d in rows.domains if (d, first) in whole]


def means(rows: Rows, backbone: str) -> dict[tuple[str, int, bool], tuple[float, float | None]]:
    """Return {(way, share, tuned): (mean, its standard error over seeds)}."""
    domains, result = whole_domains(rows, backbone), {}
    for way in planned(0):
        if values := over_seeds(rows.values(cut(backbone, *way)), domains):
            result[way] = statistics.fmean(values), error(values)
    return result


def gain(
    rows: Rows, backbone: str, other: str, share: int, tuned: bool, way: str = "loss"
) -> Comparison | None:
    """Compare one way to cut with another at 1/share of the parameters, paired by domain."""
    ours, theirs = (rows.values(cut(backbone, w, share, tuned)) for w in (way, other))
    return paired(ours, theirs, rows.domains)


def best_neighbour(rows: Rows, backbone: str, share: int, tuned: bool) -> str | None:
    """Return the best way that is not ours, by its mean on seed 0, which every way has."""
    first = means(rows.only_seed(0), backbone)
    ways = [w for w in WAYS if w not in (*METRICS, "loss-train")]
    known = {w: first[w, share, tuned][0] for w in ways if (w, share, tuned) in first}
    return max(known, key=lambda way: known[way]) if known else None
