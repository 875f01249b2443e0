"""Build adapters: untrained ones, and those of any configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import CovNormError, at_site, choices
from ..stats.ranks import rank_of
from .kinds import KINDS, Adapter
from .maps import FORMS, FullMap, LinearMap
from .norms import site_norm
from .shared import SHARED_FORMS, SharedFactors
from .site import Site
from .weights import CopiedWeights, MaskWeights

# What `fresh_adapter` accepts.
ADAPTERS = (*KINDS, "lowrank", CopiedWeights.kind, MaskWeights.kind, "none")


def fresh_adapter(adapter: str, site: Site, rank: int | float | None = None) -> Adapter:
    """Return an untrained adapter for one site.

    rank: the rank of a low-rank A, as a number of directions or a share of d. None: a full A.
    If no norm of the backbone follows the layer, the adapter brings its own B2. For "none" and for
    the kinds that replace weights, the adapter does nothing.
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
        return build({"kind": "batchnorm", "map": None, "B2": False}, site)
    described: dict[str, Any] | None = {"form": "full", "ranks": []}
    if adapter == "batchnorm":
        described = None
    elif rank is not None:
        r = rank_of(rank, site.d_out, KINDS[adapter].input_channels(site))
        described = {"form": "lowrank", "ranks": [r]}
    needs_norm = site.norm_behind is None and adapter != "conv"
    return build({"kind": adapter, "map": described, "B2": needs_norm}, site)


def build(config: dict[str, Any], site: Site, shared: SharedFactors | None = None) -> Adapter:
    """Build an adapter with new parameters from what `Adapter.config` returned.

    The A of a series adapter is (d_out, d_out), that of a parallel one (d_out, d_in). A map of
    joint mode needs the `shared` factors of its site.
    """
    with at_site(site.name):
        kind, described = config["kind"], config["map"]
        if kind not in KINDS:
            raise CovNormError(f"adapter={kind!r}: {choices(kind, KINDS)}")
        if (described is None) != (kind == "batchnorm"):
            raise CovNormError(f"a {kind} adapter cannot have the map {described!r}")
        d_in = KINDS[kind].input_channels(site)
        A = None if described is None else _build_map(described, d_in, site, shared)
    if kind == "conv" and isinstance(A, FullMap):
        nn.init.eye_(A.A)
    B1 = site_norm(site.spatial, site.d_out) if kind == "residual" else nn.Identity()
    B2 = site_norm(site.spatial, site.d_out) if config["B2"] else nn.Identity()
    return KINDS[kind](A, B1, B2)


def _build_map(
    described: dict[str, Any], d_in: int, site: Site, shared: SharedFactors | None
) -> LinearMap:
    form, ranks = described["form"], [int(r) for r in described["ranks"]]
    d_out, largest = site.d_out, max(d_in, site.d_out)
    for r in ranks:
        if not 0 <= r <= largest:
            raise CovNormError(f"rank {r} must be in 0…{largest}")
    A: LinearMap
    if form in FORMS:
        A = FORMS[form](site.spatial, d_in, d_out, *ranks)
    elif form not in SHARED_FORMS:
        raise CovNormError(f"unknown form {form!r}: {choices(form, FORMS)}")
    elif shared is None:
        raise CovNormError(f"a map of form {form!r} needs a shared basis")
    else:
        A = SHARED_FORMS[form](site.spatial, d_out, shared)
        if A.ranks != ranks or shared.W.shape[1] != d_in or len(A.factors[-1]) != d_out:
            raise CovNormError(f"has ranks {ranks}, but its basis has {A.ranks}")
    A.train_only_(described.get("trains", [n for n, _ in A.named_parameters()]))
    return A
