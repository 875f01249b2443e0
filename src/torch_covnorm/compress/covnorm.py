"""Algorithm 1 over a network: normalize every site (eq. 8), and absorb M after tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from ..adapters import CovNormMap, JointMap
from ..errors import CovNormError, at_site, check_choice
from ..network.network import MultiDomainNetwork
from ..stats.decomposition import Decomposition, MiniAdaptation, decompose
from ..stats.moments import Moments
from ..stats.ranks import (
    RankRule,
    by_budget,
    by_variance,
    by_variance_official,
    check_rank_pairs,
    check_ranks,
    check_threshold,
)
from .collect import maps_of, moments_at, replace_maps_
from .gradients import GradientMoments, Metric, gradients_at

Tuned = Literal["M", "all"]
Ranks = dict[str, tuple[int, int]]  # {site: (kx, ky)}


@dataclass(frozen=True)
class Preset:
    """What `normalize_` does: as the paper says, or as the authors' program does."""

    variance: float
    rank_rule: RankRule
    M: MiniAdaptation
    tune: Tuned
    scaled: bool  # whether W and C include their eigenvalues
    mean_sign: int  # of mu_y in the output's constant


PRESETS = {
    "paper": Preset(0.99, by_variance, "closed-form", "M", scaled=True, mean_sign=1),
    "official-code": Preset(
        0.995, by_variance_official, "random", "all", scaled=False, mean_sign=-1
    ),
}


@torch.inference_mode(False)
@torch.no_grad()
def normalize_(
    net: MultiDomainNetwork,
    name: str,
    moments: Mapping[str, Moments],
    variance: float | None = None,
    *,
    ranks: Mapping[str, tuple[int, int]] | None = None,
    budget: int | None = None,
    metric: Metric = "variance",
    gradients: Mapping[str, GradientMoments] | None = None,
    M: MiniAdaptation | None = None,
    tune: Tuned | None = None,
    preset: str = "paper",
    generator: torch.Generator | None = None,
) -> Ranks:
    """Replace each A of a domain by ``C M W`` (eq. 8); return {site: (kx, ky)}.

    Args:
        moments: of A's input at each site, from `collect`.
        variance: the threshold t of the rank rule, 0.99 in the paper; 1.0 keeps every direction.
        ranks: {site: (kx, ky)}, used instead of the rule at these sites.
        budget: adapter parameters in all, once absorbed, instead of the rule; see `ranks_within`.
        metric: what a direction is worth: its "variance" (the paper), or the "loss" it moves, which
            needs `gradients` from `collect_gradients`; see `decompose`. A budget may then leave a
            site with rank 0, where only its constant stays.
        M: "closed-form" (reproduces A at full ranks), "identity" (leaves the two PCAs unaligned;
            absorbed before tuning, it is what the paper calls PCA+FTA) or "random".
        tune: what trains afterwards: "M" (the paper's text) or "all" (its Algorithm 1: M, W and C).
            The bias mu_y, the domain's norms and its head train too.
        preset: "paper", or "official-code" for what the authors' program does.

    Everything is computed before anything is replaced: after an error the network is unchanged.
    """
    chosen = preset_of(preset, variance, M, tune)
    _check_metric(metric, gradients, M, preset)
    if budget is not None and (ranks or variance is not None):
        raise CovNormError("budget= replaces variance= and ranks=: give one of them")
    check_rank_pairs(ranks or {}, maps_of(net, name))
    parts = decompose_sites(net, name, moments, gradients, scaled=chosen.scaled)
    found = choose_ranks(parts, chosen, ranks, budget)
    normalize_to_(net, name, parts, found, chosen, generator)
    return found


def decompose_sites(
    net: MultiDomainNetwork,
    name: str,
    moments: Mapping[str, Moments],
    gradients: Mapping[str, GradientMoments] | None = None,
    scaled: bool = True,
) -> dict[str, Decomposition]:
    """Decompose each A of a domain once: {site: `Decomposition`}, for any number of cuts.

    With `gradients` the metric is the loss, otherwise the variance.
    """
    parts = {}
    for site, A in maps_of(net, name).items():
        x = moments_at(site, A, moments)
        G = None if gradients is None else gradients_at(site, A, gradients)
        with at_site(site):
            parts[site] = decompose(A.matrix(), x, G, b=A.offset, scaled=scaled)
    return parts


def choose_ranks(
    parts: Mapping[str, Decomposition],
    preset: Preset,
    ranks: Mapping[str, tuple[int, int]] | None = None,
    budget: int | None = None,
) -> Ranks:
    """Return {site: (kx, ky)}: given ranks first, then the budget or the preset's rank rule."""
    if budget is not None:
        return ranks_within(parts, budget)
    found = {}
    for site, part in parts.items():
        kx, ky = (ranks or {}).get(site) or part.ranks(preset.variance, preset.rank_rule)
        with at_site(site):
            check_ranks(kx, ky, len(part.W), part.C.shape[1], least=0 if part.in_loss else 1)
        found[site] = (kx, ky)
    return found


def ranks_within(parts: Mapping[str, Decomposition], budget: int) -> Ranks:
    """Return {site: (kx, ky)} that cost at most `budget` parameters in all, once M is absorbed.

    The budget goes to the output directions worth most, over all sites (`by_budget`). Since
    2·d·min(kx, ky) counts only the smaller rank, the input keeps every direction: C·M·W is then
    the best map of its rank in that metric. In the metric of the loss a site may get rank 0.
    """
    worths = {site: part.worth for site, part in parts.items()}
    costs = {site: sum(part.A.shape) for site, part in parts.items()}
    least = 0 if any(part.in_loss for part in parts.values()) else 1
    found = by_budget(worths, costs, budget, least)
    return {site: (len(parts[site].W), k) for site, k in found.items()}


@torch.inference_mode(False)
@torch.no_grad()
def normalize_to_(
    net: MultiDomainNetwork,
    name: str,
    parts: Mapping[str, Decomposition],
    ranks: Ranks,
    preset: Preset,
    generator: torch.Generator | None = None,
) -> None:
    """Replace each A of a domain by the cut of its decomposition at the given ranks."""
    new = {}
    for site, old in net.domain(name).maps.items():
        factors = parts[site].cut(*ranks[site], preset.M, generator)
        new[site] = map_ = CovNormMap.from_factors(old.spatial, factors)
        map_.bias.mul_(preset.mean_sign)
        map_.train_only_(("M", "bias") if preset.tune == "M" else ("M", "W", "C", "bias"))
        map_.to(old.bias)
    replace_maps_(net, name, new)


@torch.inference_mode(False)
def absorb_(net: MultiDomainNetwork, name: str) -> None:
    """Multiply each M into W or C, whichever is larger: 2 d min(kx, ky) parameters per site.

    The last step of Algorithm 1. Outputs do not change; what remains trains as a low-rank C·W. A
    domain of joint mode leaves its basis this way and keeps factors of its own.
    """
    maps = net.domain(name).maps
    maps = {site: A for site, A in maps.items() if isinstance(A, CovNormMap | JointMap)}
    if not maps:
        raise CovNormError(f"domain {name!r} has no M to absorb: call cn.normalize_ first")
    replace_maps_(net, name, {site: A.absorbed() for site, A in maps.items()})


def preset_of(
    name: str = "paper",
    variance: float | None = None,
    M: MiniAdaptation | None = None,
    tune: Tuned | None = None,
) -> Preset:
    """Return a preset by its name, with the settings that are given instead of its own."""
    check_choice("preset", name, PRESETS)
    if tune is not None:
        check_choice("tune", tune, get_args(Tuned))
    if variance is not None:
        check_threshold(variance)
    given: dict[str, Any] = {"variance": variance, "M": M, "tune": tune}
    return replace(PRESETS[name], **{k: v for k, v in given.items() if v is not None})


def _check_metric(metric: str, gradients: object, M: str | None, preset: str) -> None:
    check_choice("metric", metric, get_args(Metric))
    if metric == "variance" and gradients is not None:
        raise CovNormError("gradients= is for metric='loss': give that too")
    if metric == "loss" and gradients is None:
        raise CovNormError("metric='loss' needs gradients=: use cn.collect_gradients")
    if metric == "loss" and (M not in (None, "closed-form") or preset != "paper"):
        raise CovNormError("metric='loss' has a closed-form M of its own: leave out M= and preset=")
