"""Table 1: every method on every domain, VGG16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from .bench import Bench

SEVERAL = ("ra", "covnorm", "svd-fta", "fta", "covnorm-joint")  # three seeds; the rest have one
# Without LwF: it keeps the answers of the old head, and VGG16's file has its convolutions alone.
ONE = ("fnft", "bn", "parallel", "dan", "svd", "pca-fta", "piggyback", "joint-svd")
OPTIONS: dict[str, dict[str, Any]] = {
    "covnorm": {"variance": 0.99},
    "pca-fta": {"variance": 0.99},
    "covnorm-joint": {"variance": 0.99},
    "joint-svd": {"rank": 7 / 16},  # with its part of what seven share, half of A: as SVD+FTA
}


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int], methods: Iterable[str]) -> None:
    """All cells of these domains, seeds and methods."""
    names = list(names)
    for seed in seeds:
        for method in methods:
            options = OPTIONS.get(method, {})
            if cn.METHODS[method].joint:
                bench.together(method, names, seed, **options)
                continue
            for domain in names:
                bench.cell(method, domain, seed, **options)
