"""Joint mode in three ways at equal ranks: shared bases of the variance, of the loss, of the A's.

The last follows the joint diagonalisation of LoRA collections (JD-Full): ``A_i ≈ C M_i W`` with
orthonormal C and W that all domains share, by alternating eigenproblems; it uses no data. M is
measured before and after tuning; C and W stay fixed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_covnorm as cn
from torch_covnorm.adapters import CovNormMap
from torch_covnorm.stats.decomposition import Factors
from torch_covnorm.stats.ranks import rank_of

from .bench import Bench
from .keys import shared
from .settings import TUNING

RATIOS = (1 / 8, 1 / 16)  # kx = ky = d·ratio
WAYS = {  # {way: what the shared bases are made of}
    "variance": "variance",
    "loss": "loss",
    "diagonal": "the A's only (after JD-Full)",
}


def keys(backbone: str, domains: int) -> dict[tuple[float, str], tuple[dict[str, Any], ...]]:
    """Return {(ratio, way): its keys before and after tuning} where so many domains share."""
    return {
        (ratio, way): tuple(shared(backbone, way, ratio, domains, t) for t in (False, True))
        for ratio in RATIOS
        for way in WAYS
    }


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """Measure every domain, ratio and way, before and after tuning."""
    names = list(names)
    for seed in seeds:
        for (ratio, way), pair in keys(bench.backbone, len(names)).items():
            wanted = {d: [bench.where(d, seed) | key for key in pair] for d in names}
            if not all(bench.lines.find(**key) for both in wanted.values() for key in both):
                _run(bench, wanted, seed, way, ratio)


def _run(
    bench: Bench, names: Mapping[str, list[dict[str, Any]]], seed: int, way: str, ratio: float
) -> None:
    """Measure domains {name: keys of its two rows} that share bases."""
    net, start = bench.net, time.perf_counter()
    cells = {d: f"cell-{d}" for d in names}
    trained = {d: bench.trained(d, seed) for d in names}
    for d in names:
        net.copy_domain(trained[d], cells[d])
    private, common = _share(bench, cells, trained, way, ratio, seed)
    print("…", "shared", way, ratio, seed, f"{time.perf_counter() - start:.0f} s", flush=True)
    sizes = {"parameters": private, "shared": common, "bytes": 4 * private}
    for d in names:
        for key in names[d]:
            start = time.perf_counter()
            if key["tuned"]:
                parts = bench.parts(d)
                tuning = {"epochs": TUNING, "lr": key["lr"], "seed": seed}
                tuning |= {"norm_statistics": "frozen"}
                cn.fit(net, cells[d], parts["train"], parts["val"], progress=False, **tuning)
            accuracy = cn.evaluate(net, cells[d], bench.parts(d)["test"]).accuracy
            if not bench.lines.find(**key):
                seconds = round(time.perf_counter() - start, 1)
                row = {**key, **bench.start(trained[d]), "accuracy": accuracy, **sizes}
                bench.lines.add({**row, "seconds": seconds})
    for cell in cells.values():
        net.remove_domain(cell)
    for basis in list(net.bases):
        net.remove_basis(basis)


def _share(
    bench: Bench,
    cells: dict[str, str],
    trained: dict[str, str],
    way: str,
    ratio: float,
    seed: int,
) -> tuple[int, int]:
    """Put the domains on shared factors; return the parameters of each, and the shared ones."""
    net, first = bench.net, next(iter(trained.values()))
    shapes = {s: A.matrix().shape for s, A in net.domain(first).maps.items()}
    ranks = {s: rank_of(ratio, *shape) for s, shape in shapes.items()}
    private = sum(r * r for r in ranks.values())
    common = sum(r * sum(shapes[s]) for s, r in ranks.items())
    if way == "diagonal":
        for site, r in ranks.items():
            A = [net.domain(c).maps[site].matrix().detach().double() for c in cells.values()]
            C, W = joint_diagonal(A, r)
            for cell, matrix in zip(cells.values(), A, strict=True):
                adapter = net.domain(cell).adapters[site]
                old, zero = adapter.A, torch.zeros(matrix.shape[1]).double()
                factors = Factors(W, C.T @ matrix @ W.T, C, zero, old.bias.detach().double())
                adapter.A = CovNormMap.from_factors(old.spatial, factors).to(old.bias)
                adapter.A.train_only_(("M", "bias"))
        return private, common
    moments = {cells[d]: cn.collect(net, cells[d], bench.parts(d)["plain"]) for d in cells}
    gradients = {
        cells[d]: cn.collect_gradients(net, cells[d], bench.parts(d)["val"], seed=seed)
        for d in (cells if way == "loss" else ())
    }
    pairs = {s: (r, r) for s, r in ranks.items()}
    cn.join_(
        net, list(cells.values()), moments, ranks=pairs, metric=way, gradients=gradients or None
    )
    return private, common


def joint_diagonal(matrices: Sequence[Tensor], r: int, rounds: int = 20) -> tuple[Tensor, Tensor]:
    """Return the orthonormal C (d_out, r) and W (r, d_in) that minimise ``Σ |A_i - C M_i W|²``."""
    W = torch.linalg.eigh(sum(A.T @ A for A in matrices))[1].flip(1)[:, :r].T
    for _ in range(rounds):
        C = torch.linalg.eigh(sum(A @ W.T @ W @ A.T for A in matrices))[1].flip(1)[:, :r]
        W = torch.linalg.eigh(sum(A.T @ C @ C.T @ A for A in matrices))[1].flip(1)[:, :r].T
    return C, W
