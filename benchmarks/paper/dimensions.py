"""Effective dimensions: η = ky/kx per layer, and how fast each spectrum falls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import torch_covnorm as cn
from torch_covnorm.stats.ranks import by_variance

from .bench import Bench

THRESHOLDS = (0.9, 0.95, 0.99)
POINTS = 64  # kept of each curve


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """Measure one row per domain and seed: ranks at each threshold, and the variance explained."""
    for seed in seeds:
        for domain in names:
            key = {**bench.where(domain, seed), "method": "spectra"}
            if not bench.lines.find(**key):
                print("…", *key.values(), flush=True)
                bench.lines.add({**key, **_measured(bench, domain, seed)})


def _measured(bench: Bench, domain: str, seed: int) -> dict[str, Any]:
    net, name, start = bench.net, bench.trained(domain, seed), time.perf_counter()
    moments = cn.collect(net, name, bench.parts(domain)["plain"])
    ranks: dict[str, dict[str, tuple[int, int]]] = {f"{t:g}": {} for t in THRESHOLDS}
    explained: dict[str, dict[str, list[float]]] = {}
    for site, A in net.domain(name).maps.items():
        matrix, x = A.matrix().detach().double(), moments[site]
        y = x.transform(matrix, A.offset.detach().double())
        of_x, of_y = x.pca()[0], y.pca()[0]
        for t in THRESHOLDS:
            ranks[f"{t:g}"][site] = (by_variance(of_x, t), by_variance(of_y, t))
        spectra = {"x": of_x, "y": of_y, "A": torch.linalg.svdvals(matrix).square()}
        explained[site] = {k: _curve(E) for k, E in spectra.items()}
    account = bench.sizes(name)
    seconds = round(time.perf_counter() - start, 1)
    begun = bench.start(name)
    return {**begun, "ranks": ranks, "explained": explained, **account, "seconds": seconds}


def _curve(E: torch.Tensor) -> list[float]:
    """Return the share that the first i/POINTS of the directions explain, i = 1…POINTS."""
    shares = E.cumsum(0) / E.sum()
    places = [max(1, round(len(E) * i / POINTS)) - 1 for i in range(1, POINTS + 1)]
    return [round(float(shares[p]), 4) for p in places]


def ratios(rows: Sequence[Mapping[str, Any]], t: float) -> np.ndarray:
    """Return η = ky/kx of measured rows at a threshold: (domains, layers), in network order."""
    ranks = [row["ranks"][f"{t:g}"].values() for row in rows]
    return np.array([[ky / max(kx, 1) for kx, ky in by_site] for by_site in ranks])


def explained(rows: Sequence[Mapping[str, Any]], site: str) -> dict[str, np.ndarray]:
    """Return the variance that x, y and A explain at a site, averaged over measured rows."""
    return {k: np.mean([row["explained"][site][k] for row in rows], axis=0) for k in "xyA"}
