"""Adapters: one file a structure (residual, parallel, conv, batchnorm), their matrices in `maps`.

`build` makes one for a site; `fold` says what they do in eval mode, and `infer` runs that.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import CovNormError, choices
from .base import Adapter, frozen
from .batchnorm import BatchNormAdapter
from .conv import ConvAdapter
from .fold import Folded, fold, padded_share
from .infer import run_folded
from .maps import CovNormMap, FullMap, LinearMap, LowRankMap, build_map
from .norms import scale_shifts, site_norm
from .parallel import ParallelAdapter
from .residual import ResidualAdapter
from .weights import merged_weight

KINDS = {a.kind: a for a in (ResidualAdapter, ParallelAdapter, ConvAdapter, BatchNormAdapter)}


def fresh_config(
    kind: str, d_in: int, d_out: int, own_norm: bool, rank: int | float | None
) -> dict[str, Any]:
    """The config of an untrained adapter: A full, or of a rank given as a number or share of d.

    `own_norm`: no norm of the backbone follows, so the adapter brings its own B2.
    """
    if kind == "lowrank":
        kind, rank = "residual", 0.25 if rank is None else rank
    if kind not in KINDS:
        raise CovNormError(f"adapter={kind!r}: {choices(kind, [*KINDS, 'lowrank'])}")
    form: dict[str, Any] | None = {"form": "full", "ranks": []}
    if rank is not None and kind not in ("residual", "parallel"):
        raise CovNormError(f"rank={rank}: a {kind} adapter has none; residual or parallel have")
    if rank is not None:
        share = isinstance(rank, float)
        if (share and not 0 < rank < 1) or rank <= 0:
            raise CovNormError(f"rank={rank}: give a whole number from 1, or a share in (0, 1)")
        r = max(1, round(rank * d_out)) if share else int(rank)
        form = {"form": "lowrank", "ranks": [min(r, d_out, d_in if kind == "parallel" else d_out)]}
    return {
        "kind": kind,
        "map": None if kind == "batchnorm" else form,
        "B2": own_norm and kind != "conv",
    }


def build(config: dict[str, Any], spatial: bool, d_in: int, d_out: int, site: str = "?") -> Adapter:
    """A fresh adapter: `config` is as `Adapter.config` gives it.

    Channels d_in → d_out are those of the frozen layer; a series adapter's A is (d_out, d_out).
    """
    kind = config["kind"]
    if kind not in KINDS:
        raise CovNormError(f"adapter={kind!r}: {choices(kind, KINDS)}")
    structure = KINDS[kind]
    if structure.map_input == "output":
        d_in = d_out
    A = None
    if (config["map"] is None) != (kind == "batchnorm"):
        raise CovNormError(f"site {site!r}: a {kind} adapter with map {config['map']!r}")
    if config["map"] is not None:
        ranks = [int(r) for r in config["map"]["ranks"]]
        for r in ranks:
            if not 1 <= r <= max(d_in, d_out):
                raise CovNormError(f"site {site!r}: rank {r}, must lie in 1…{max(d_in, d_out)}")
        A = build_map(config["map"]["form"], spatial, d_in, d_out, ranks)
        A.train_only_(config["map"].get("trains", [n for n, _ in A.named_parameters()]))
    if kind == "conv" and isinstance(A, FullMap):
        nn.init.eye_(A.A)
    B1 = site_norm(spatial, d_out) if kind == "residual" else nn.Identity()
    B2 = site_norm(spatial, d_out) if config["B2"] else nn.Identity()
    return structure(A, B1, B2)


__all__ = [
    "KINDS",
    "Adapter",
    "CovNormMap",
    "Folded",
    "FullMap",
    "LinearMap",
    "LowRankMap",
    "build",
    "fold",
    "fresh_config",
    "frozen",
    "merged_weight",
    "padded_share",
    "run_folded",
    "scale_shifts",
]
