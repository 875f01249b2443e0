"""Joint mode in three ways at equal ranks: shared bases of the variance, of the loss, of the A's.

The last is after the joint diagonalisation of LoRA collections (JD-Full): ``A_i ≈ C M_i W`` with
orthonormal C and W that all share, by alternating eigenproblems; it sees no data. M is measured as
it comes and tuned; C and W stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_covnorm as cn
from torch_covnorm.adapters import CovNormMap
from torch_covnorm.stats.decomposition import Factors
from torch_covnorm.stats.ranks import rank_of

from .bench import Bench
from .settings import TUNING

RATIOS = (1 / 8, 1 / 16)  # kx = ky = d·ratio
WAYS = ("variance", "loss", "diagonal")


def run(bench: Bench, names: Iterable[str], seeds: Iterable[int]) -> None:
    """All rows, one a domain, ratio, way and stage."""
    names = list(names)
    for seed in seeds:
        for ratio in RATIOS:
            for way in WAYS:
                key = {"method": "shared", "way": way, "ratio": ratio, "sharing": len(names)}
                wanted = [k for d in names for k in keys(bench, d, seed, key)]
                if not all(bench.lines.find(**k) for k in wanted):
                    _run(bench, names, seed, key)


def keys(bench: Bench, domain: str, seed: int, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the two rows of a domain: as it comes, and tuned."""
    where = {**bench.where(domain, seed), **key}
    return [{**where, "tuned": False}, {**where, "tuned": True, "lr": bench.rate("shared")}]


def _run(bench: Bench, names: Sequence[str], seed: int, key: dict[str, Any]) -> None:
    net, start = bench.net, time.perf_counter()
    cells = {d: f"cell-{d}" for d in names}
    trained = {d: bench.trained(d, seed) for d in names}
    for d in names:
        net.copy_domain(trained[d], cells[d])
    own, shared = _share(bench, cells, trained, key["way"], key["ratio"], seed)
    print("…", *key.values(), seed, f"{time.perf_counter() - start:.0f} s", flush=True)
    for d in names:
        for where in keys(bench, d, seed, key):
            start = time.perf_counter()
            if where["tuned"]:
                parts, rate = bench.parts(d), where["lr"]
                tuning = {"epochs": TUNING, "lr": rate, "norms": "frozen", "seed": seed}
                cn.fit(net, cells[d], parts["train"], parts["val"], progress=False, **tuning)
            accuracy = cn.evaluate(net, cells[d], bench.parts(d)["test"]).accuracy
            row = {"accuracy": accuracy, "parameters": own, "shared": shared, "bytes": 4 * own}
            if not bench.lines.find(**where):
                seconds = round(time.perf_counter() - start, 1)
                begun = bench.start(trained[d])
                bench.lines.add({**where, **begun, **row, "seconds": seconds})
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
    """Put the domains on shared factors; returns each one's own parameters, and the shared."""
    net, first = bench.net, next(iter(trained.values()))
    shapes = {s: A.matrix().shape for s, A in net.domain(first).maps.items()}
    ranks = {s: rank_of(ratio, *shape) for s, shape in shapes.items()}
    own = sum(r * r for r in ranks.values())
    shared = sum(r * sum(shapes[s]) for s, r in ranks.items())
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
        return own, shared
    moments = {cells[d]: cn.collect(net, cells[d], bench.parts(d)["plain"]) for d in cells}
    felt = {}
    if way == "loss":
        felt["gradients"] = {
            cells[d]: cn.collect_gradients(net, cells[d], bench.parts(d)["val"], seed=seed)
            for d in cells
        }
    pairs = {s: (r, r) for s, r in ranks.items()}
    cn.join_(net, list(cells.values()), moments, ranks=pairs, metric=way, **felt)
    return own, shared


def joint_diagonal(matrices: Sequence[Tensor], r: int, rounds: int = 20) -> tuple[Tensor, Tensor]:
    """C (d_out, r) and W (r, d_in), orthonormal, that minimise ``Σ |A_i - C M_i W|²``."""
    W = torch.linalg.eigh(sum(A.T @ A for A in matrices))[1].flip(1)[:, :r].T
    for _ in range(rounds):
        C = torch.linalg.eigh(sum(A @ W.T @ W @ A.T for A in matrices))[1].flip(1)[:, :r]
        W = torch.linalg.eigh(sum(A.T @ C @ C.T @ A for A in matrices))[1].flip(1)[:, :r].T
    return C, W
