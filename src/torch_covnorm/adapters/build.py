"""Build adapters: the configuration of an untrained one, and the module for any configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import CovNormError, choices
from ..stats.ranks import rank_of
from .kinds import KINDS, Adapter
from .maps import FORMS, FullMap, LinearMap
from .norms import site_norm
from .shared import SHARED_FORMS, SharedFactors
from .weights import WEIGHT_KINDS

ADAPTERS = (*KINDS, "lowrank", *WEIGHT_KINDS, "none")  # what `fresh_config` accepts


def fresh_config(
    adapter: str, d_in: int, d_out: int, needs_norm: bool, rank: int | float | None
) -> dict[str, Any]:
    """Return the configuration of an untrained adapter of one site.

    rank: the rank of a low-rank A, as a number of directions or a share of d. None: a full A.
    needs_norm: no norm of the backbone follows the layer, so the adapter brings its own B2.
    For "none" and for the kinds that replace weights, the adapter does nothing.
    """
    if adapter not in ADAPTERS:
        raise CovNormError(f"adapter={adapter!r}: {choices(adapter, ADAPTERS)}")
    if adapter == "lowrank":
        adapter, rank = "residual", 0.25 if rank is None else rank
    if rank is not None and adapter not in ("residual", "parallel"):
        raise CovNormError(
            f"rank={rank}: adapter={adapter!r} has no rank. Use residual or parallel, or leave out "
            "rank=."
        )
    if adapter not in KINDS:
        return {"kind": "batchnorm", "map": None, "B2": False}
    described: dict[str, Any] | None = {"form": "full", "ranks": []}
    if adapter == "batchnorm":
        described = None
    elif rank is not None:
        r = rank_of(rank, d_out, d_in if adapter == "parallel" else d_out)
        described = {"form": "lowrank", "ranks": [r]}
    return {"kind": adapter, "map": described, "B2": needs_norm and adapter != "conv"}


def build(
    config: dict[str, Any],
    spatial: bool,
    d_in: int,
    d_out: int,
    site: str = "?",
    shared: SharedFactors | None = None,
) -> Adapter:
    """Build an adapter with new parameters from what `Adapter.config` or `fresh_config` returned.

    d_in → d_out are the channels of the layer. The A of a series adapter is (d_out, d_out). A map
    of joint mode needs the `shared` factors of its site.
    """
    kind, described = config["kind"], config["map"]
    if kind not in KINDS:
        raise CovNormError(f"site {site!r}: adapter={kind!r}: {choices(kind, KINDS)}")
    if (described is None) != (kind == "batchnorm"):
        raise CovNormError(f"site {site!r}: a {kind} adapter cannot have the map {described!r}")
    if KINDS[kind].map_input == "output":
        d_in = d_out
    A = None if described is None else _build_map(described, spatial, d_in, d_out, site, shared)
    if kind == "conv" and isinstance(A, FullMap):
        nn.init.eye_(A.A)
    B1 = site_norm(spatial, d_out) if kind == "residual" else nn.Identity()
    B2 = site_norm(spatial, d_out) if config["B2"] else nn.Identity()
    return KINDS[kind](A, B1, B2)


def _build_map(
    described: dict[str, Any],
    spatial: bool,
    d_in: int,
    d_out: int,
    site: str,
    shared: SharedFactors | None,
) -> LinearMap:
    form, ranks = described["form"], [int(r) for r in described["ranks"]]
    for r in ranks:
        if not 0 <= r <= max(d_in, d_out):
            raise CovNormError(f"site {site!r}: rank {r} must be in 0…{max(d_in, d_out)}")
    A: LinearMap
    if form in FORMS:
        A = FORMS[form](spatial, d_in, d_out, *ranks)
    elif form not in SHARED_FORMS:
        raise CovNormError(f"site {site!r}: unknown form {form!r}: {choices(form, FORMS)}")
    elif shared is None:
        raise CovNormError(f"site {site!r}: a map of form {form!r} needs a shared basis")
    else:
        A = SHARED_FORMS[form](spatial, d_out, shared)
        if A.ranks != ranks or shared.W.shape[1] != d_in or len(A.factors[-1]) != d_out:
            raise CovNormError(f"site {site!r}: has ranks {ranks}, but its basis has {A.ranks}")
    A.train_only_(described.get("trains", [n for n, _ in A.named_parameters()]))
    return A
