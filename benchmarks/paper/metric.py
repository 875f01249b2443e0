"""Variance or loss: accuracy against adapter parameters, for each metric and its neighbours.

Residual adapters are trained once a domain and seed, then cut to 1/8, 1/16 and 1/32 of their
parameters: by CovNorm with one threshold t (the paper), with one budget in the metric of the
variance (the PCA of y) and of the loss, and by the neighbours. Measured as they are; the two
metrics and SVD with one budget also tuned. Three seeds have the question itself, which is the two
metrics, and SVD with one budget as it is; the rest is of the first seed.

The gradients are those of the validation images. On its training images a network is so sure that
all but a few have none, and G is noise: "loss-train" shows what that costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from .bench import Bench
from .neighbours import CUTS, Trained, apply_, one_threshold
from .settings import TUNING, rates

SHARES = (8, 16, 32)
METRICS = ("variance", "loss")
WAYS = ("threshold", *METRICS, "loss-train", *CUTS)
TUNED = (*METRICS, "svd-greedy")
SEVERAL = {False: TUNED, True: METRICS}  # tuned or not: the ways of every seed
ONE = {False: WAYS, True: TUNED}  # of the first


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """All rows of these domains and seeds."""
    for seed in seeds:
        for domain in names:
            _run(bench, domain, seed, keys(bench, domain, seed))


def search(bench: Bench, names: Iterable[str]) -> None:
    """The tuned ways at every rate, as `rates.run` does it for the methods."""
    for domain in names:
        tuned = [key for key in keys(bench, domain, 0) if key["tuned"]]
        tried = [{**k, "lr": r} for k in tuned for r in rates(bench.backbone, f"cut-{k['way']}")]
        _run(bench, domain, 0, tried)


def keys(bench: Bench, domain: str, seed: int) -> list[dict[str, Any]]:
    """What the rows of one domain and seed are found by."""
    base = {**bench.where(domain, seed), "method": "cut"}
    ways = SEVERAL if seed else ONE
    wanted = [(w, s, t) for s in SHARES for w in WAYS for t in (False, True) if w in ways[t]]
    return [
        {**base, "way": w, "share": s, "tuned": t, **({"lr": bench.rate(f"cut-{w}")} if t else {})}
        for w, s, t in wanted
    ]


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
            tuning = {"epochs": TUNING, "lr": key["lr"], "norms": "frozen", "seed": seed}
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
