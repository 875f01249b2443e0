"""Adapters: one file a structure (residual, parallel, conv, batchnorm), their matrices in `maps`.

`build` makes one for a site; `fold` says what they do in eval mode, and `infer` runs that. `own`
holds the two that change a layer's weights instead, `shared` the matrices of joint mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import CovNormError, choices
from ..stats.ranks import rank_of
from .base import Adapter, base_forward
from .batchnorm import BatchNormAdapter
from .conv import ConvAdapter
from .fold import Folded, fold, forms, padded_share, stacked
from .infer import run_folded
from .maps import CovNormMap, FullMap, LinearMap, LowRankMap, build_map
from .merged import merged_weight
from .norms import scale_shifts, site_norm
from .parallel import ParallelAdapter
from .residual import ResidualAdapter
from .shared import JointMap, SharedFactors, SharedMap
from .weights import MaskWeights, OwnWeights, WeightAdapter, double

KINDS = {a.kind: a for a in (ResidualAdapter, ParallelAdapter, ConvAdapter, BatchNormAdapter)}
WEIGHT_KINDS = {a.kind: a for a in (OwnWeights, MaskWeights)}
ADAPTERS = (*KINDS, "lowrank", *WEIGHT_KINDS, "none")  # what `fresh_config` takes
SHARED_FORMS = {m.form: m for m in (JointMap, SharedMap)}


def fresh_config(
    kind: str, d_in: int, d_out: int, own_norm: bool, rank: int | float | None
) -> dict[str, Any]:
    """The config of an untrained adapter: A full, or of a rank given as a number or share of d.

    `own_norm`: no norm of the backbone follows, so the adapter brings its own B2. For "none", and
    for the kinds that change weights, nothing is behind the layer.
    """
    if kind == "none" or kind in WEIGHT_KINDS:
        if rank is not None:
            raise CovNormError(f"rank={rank}: adapter={kind!r} has none; residual or parallel have")
        return {"kind": "batchnorm", "map": None, "B2": False}
    if kind == "lowrank":
        kind, rank = "residual", 0.25 if rank is None else rank
    if kind not in KINDS:
        raise CovNormError(f"adapter={kind!r}: {choices(kind, ADAPTERS)}")
    form: dict[str, Any] | None = {"form": "full", "ranks": []}
    if rank is not None and kind not in ("residual", "parallel"):
        raise CovNormError(f"rank={rank}: a {kind} adapter has none; residual or parallel have")
    if rank is not None:
        r = rank_of(rank, d_out, d_in if kind == "parallel" else d_out)
        form = {"form": "lowrank", "ranks": [r]}
    return {
        "kind": kind,
        "map": None if kind == "batchnorm" else form,
        "B2": own_norm and kind != "conv",
    }


def build(
    config: dict[str, Any],
    spatial: bool,
    d_in: int,
    d_out: int,
    site: str = "?",
    shared: SharedFactors | None = None,
) -> Adapter:
    """A fresh adapter: `config` is as `Adapter.config` gives it.

    Channels d_in → d_out are those of the frozen layer; a series adapter's A is (d_out, d_out).
    A map of joint mode takes its `shared` factors.
    """
    kind = config["kind"]
    if kind not in KINDS:
        raise CovNormError(f"adapter={kind!r}: {choices(kind, KINDS)}")
    structure = KINDS[kind]
    if structure.map_input == "output":
        d_in = d_out
    A: LinearMap | None = None
    if (config["map"] is None) != (kind == "batchnorm"):
        raise CovNormError(f"site {site!r}: a {kind} adapter with map {config['map']!r}")
    if config["map"] is not None:
        ranks = [int(r) for r in config["map"]["ranks"]]
        for r in ranks:
            if not 0 <= r <= max(d_in, d_out):
                raise CovNormError(f"site {site!r}: rank {r}, must lie in 0…{max(d_in, d_out)}")
        if config["map"]["form"] in SHARED_FORMS:
            A = _joint(config["map"]["form"], spatial, d_in, d_out, ranks, shared, site)
        else:
            A = build_map(config["map"]["form"], spatial, d_in, d_out, ranks)
        A.train_only_(config["map"].get("trains", [n for n, _ in A.named_parameters()]))
    if kind == "conv" and isinstance(A, FullMap):
        nn.init.eye_(A.A)
    B1 = site_norm(spatial, d_out) if kind == "residual" else nn.Identity()
    B2 = site_norm(spatial, d_out) if config["B2"] else nn.Identity()
    return structure(A, B1, B2)


def own_weights(
    kind: str, layers: Mapping[str, nn.Module], packed: bool = False
) -> dict[str, WeightAdapter]:
    """Weights of a domain's own for these layers of the backbone; masks may come packed."""
    tied: dict[nn.Parameter, nn.Parameter] = {}
    weights: dict[str, WeightAdapter] = {}
    for name, layer in layers.items():
        if kind == "own":
            weights[name] = OwnWeights(layer, tied)
            continue
        if is_parametrized(layer):
            raise CovNormError(
                f"layer {name!r}: its weight is parametrized, so there is none to mask: remove the "
                "parametrization first"
            )
        weights[name] = MaskWeights(layer, packed)
    return weights


def _joint(
    form: str,
    spatial: bool,
    d_in: int,
    d_out: int,
    ranks: list[int],
    shared: SharedFactors | None,
    site: str,
) -> LinearMap:
    if shared is None:
        raise CovNormError(f"site {site!r}: a map of joint mode, but no basis to share")
    A = SHARED_FORMS[form](spatial, d_out, shared)
    if A.ranks != ranks or shared.W.shape[1] != d_in or len(A.factors[-1]) != d_out:
        raise CovNormError(f"site {site!r}: ranks {ranks}, but its basis has {A.ranks}")
    return A


__all__ = [
    "KINDS",
    "WEIGHT_KINDS",
    "Adapter",
    "ConvAdapter",
    "CovNormMap",
    "Folded",
    "FullMap",
    "JointMap",
    "LinearMap",
    "LowRankMap",
    "MaskWeights",
    "OwnWeights",
    "SharedFactors",
    "SharedMap",
    "WeightAdapter",
    "base_forward",
    "build",
    "double",
    "fold",
    "forms",
    "fresh_config",
    "merged_weight",
    "own_weights",
    "padded_share",
    "run_folded",
    "scale_shifts",
    "stacked",
]
