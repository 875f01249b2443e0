"""Table 1: every method on every domain, VGG16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch_covnorm as cn

from .bench import Bench
from .keys import cell

SEVERAL = ("ra", "covnorm", "svd-fta", "fta", "covnorm-joint")  # three seeds; the others have one
# Without LwF: it preserves the answers of the old head, and VGG16's file has only convolutions.
ONE = ("fnft", "bn", "parallel", "dan", "svd", "pca-fta", "piggyback", "joint-svd")
VARIANCE = 0.99


def options(method: str, domains: int) -> dict[str, Any]:
    """Return the options of a method when so many domains may share."""
    if method == "joint-svd":  # half of A including its part of the shared factor, as SVD+FTA
        return {"rank": domains / (2 * (domains + 1))}
    by_variance = method in ("covnorm", "pca-fta", "covnorm-joint")
    return {"variance": VARIANCE} if by_variance else {}


def key(method: str, domains: int) -> dict[str, Any]:
    """Return the key of a method when so many domains may share."""
    return cell("vgg16", method, options(method, domains), domains=domains)


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int], methods: Iterable[str]) -> None:
    """Measure all cells of these domains, seeds and methods."""
    names = list(names)
    for seed in seeds:
        for method in methods:
            given = options(method, len(names))
            if cn.METHODS[method].joint:
                bench.together(method, names, seed, **given)
                continue
            for domain in names:
                bench.cell(method, domain, seed, **given)
