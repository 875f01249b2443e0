"""Algorithm 1 over a network: collect the moments, normalise every site, absorb M after tuning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..adapters import CovNormMap, JointMap, LinearMap
from ..errors import CovNormError, choices
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode, stepwise
from ..stats.decomposition import PCA, MiniAdaptation, covariance_normalization, loss_normalization
from ..stats.moments import Moments
from ..stats.ranks import by_budget, by_variance, by_variance_official, check_ranks, check_threshold
from ..training.batches import images_of
from .gradients import GradientMoments, Metric, gradients_at


@dataclass(frozen=True)
class Preset:
    """What normalize_ does: the paper, or the authors' program."""

    variance: float
    rank_rule: Callable[[Tensor, float], int]
    M: MiniAdaptation
    tune: Literal["M", "all"]
    scaled: bool  # W and C with their eigenvalues, or eigenvectors alone
    mean_sign: int  # of mu_y in the output's constant


PRESETS = {
    "paper": Preset(0.99, by_variance, "closed-form", "M", scaled=True, mean_sign=1),
    "official-code": Preset(
        0.995, by_variance_official, "random", "all", scaled=False, mean_sign=-1
    ),
}


@torch.no_grad()
def collect(net: MultiDomainNetwork, name: str, loader: Iterable[Any]) -> dict[str, Moments]:
    """{site: moments of A's input x}, over every position of every image, in eval mode.

    The loader yields (images, labels) or images. The output's moments follow: y = A x + b. To see
    progress, wrap the loader; over processes, give each its shard, which may be empty, and then
    `Moments.all_reduce_`.
    """
    domain = net.domain(name)
    maps = domain.maps
    if not maps:
        raise CovNormError(f"domain {name!r} has no matrix A to collect for: adapter='residual'")
    device = next(net.backbone.parameters()).device
    moments = {site: Moments(A.factors[0].shape[1], device) for site, A in maps.items()}
    hooks = [
        A.register_forward_pre_hook(_observer(site, A.spatial, moments[site]))
        for site, A in maps.items()
    ]
    try:
        with eval_mode(net.backbone, domain), stepwise():
            for batch in loader:
                net(images_of(batch).to(device), domain=name)
    finally:
        for hook in hooks:
            hook.remove()
    return moments


@torch.inference_mode(False)
@torch.no_grad()
def normalize_(
    net: MultiDomainNetwork,
    name: str,
    moments: dict[str, Moments],
    variance: float | None = None,
    *,
    ranks: dict[str, tuple[int, int]] | None = None,
    budget: int | None = None,
    metric: Metric = "variance",
    gradients: Mapping[str, GradientMoments] | None = None,
    M: MiniAdaptation | None = None,
    tune: Literal["M", "all"] | None = None,
    preset: str = "paper",
    generator: torch.Generator | None = None,
) -> dict[str, tuple[int, int]]:
    """Replace each A of a domain by ``C M W`` (eq. 8); returns {site: (kx, ky)}.

    Args:
        moments: of A's input at each site, from `collect`.
        variance: the threshold t of the rank rule, 0.99 in the paper; 1.0 keeps every direction.
        ranks: {site: (kx, ky)} instead of the rule.
        budget: adapter parameters in all, once absorbed, instead of the rule; see `ranks_within`.
        metric: what a direction is worth: its "variance" (the paper), or the "loss" that it moves,
            which needs `gradients` from `collect_gradients`; see `loss_normalization`. A budget may
            then leave a site with rank 0: only its constant stays.
        M: "closed-form" (reproduces A at full ranks), "identity" (the two PCAs unaligned; absorbed
            before it is tuned, it is what the paper calls PCA+FTA) or "random".
        tune: what trains afterwards: "M" (the paper's text) or "all" (its Algorithm 1: M, W, C).
            The bias mu_y, the domain's norms and its head train too.
        preset: "paper", or "official-code" for what the authors' program does.

    All sites are computed first; on an error the network is as it was.
    """
    chosen = _preset(preset, variance, M, tune)
    _check_metric(metric, gradients, M, preset)
    if budget is not None:
        if ranks or variance is not None:
            raise CovNormError("budget= takes the place of variance= and ranks=: give one of them")
        ranks = ranks_within(net, name, moments, budget, gradients if metric == "loss" else None)
    new: dict[str, LinearMap] = {}
    for site, adapter in net.domain(name).adapters.items():
        if adapter.A is None:
            continue
        x = _moments_for(site, adapter.A, moments)
        given = _pair((ranks or {}).get(site), site)
        if metric == "loss":
            G = gradients_at(site, adapter.A, gradients)
            new[site] = _in_loss(adapter.A, x, G, given, chosen.variance, site)
            continue
        new[site] = _normalized(adapter.A, x, given, chosen, site, generator)
    if not new:
        raise CovNormError(f"domain {name!r} has no matrix A to normalise: adapter='residual'")
    unknown = set(ranks or {}) - set(new)
    if unknown:
        raise CovNormError(f"ranks for {sorted(unknown)}: {choices(min(unknown), new)}")
    adapters = net.domain(name).adapters
    for site, map_ in new.items():
        map_.train_only_(("M", "bias") if chosen.tune == "M" else ("M", "W", "C", "bias"))
        adapters[site].A = map_.to(adapters[site].A.bias).train(net.training)
    net.domain(name).basis = None
    return {site: (map_.ranks[0], map_.ranks[1]) for site, map_ in new.items()}


@torch.no_grad()
def ranks_within(
    net: MultiDomainNetwork,
    name: str,
    moments: dict[str, Moments],
    budget: int,
    gradients: Mapping[str, GradientMoments] | None = None,
) -> dict[str, tuple[int, int]]:
    """{site: (kx, ky)} that cost at most `budget` parameters in all, once M is absorbed.

    The budget goes to the output directions of largest variance, over all sites (`by_budget`), or
    with `gradients` to those that the loss feels most. As 2·d·min(kx, ky) counts the smaller rank
    alone, the input keeps every direction: C·M·W is then the best map of its rank in that metric.
    """
    spectra, widths = {}, {}
    for site, A in net.domain(name).maps.items():
        x = _moments_for(site, A, moments)
        if gradients is not None:
            G = gradients_at(site, A, gradients)
            matrix = A.matrix().cpu().to(x.mean)
            spectra[site] = loss_normalization(matrix, PCA.of(x), G, x.mean)[1]
            widths[site] = tuple(reversed(matrix.shape))
            continue
        y = x.transform(*(t.cpu().to(x.mean) for t in (A.matrix(), A.offset)))
        spectra[site], widths[site] = y.pca()[0], (A.factors[0].shape[1], len(y.mean))
    costs = {site: sum(widths[site]) for site in widths}
    least = 1 if gradients is None else 0
    return {s: (widths[s][0], k) for s, k in by_budget(spectra, costs, budget, least).items()}


@torch.inference_mode(False)
def absorb_(net: MultiDomainNetwork, name: str) -> None:
    """Multiply each M into W or C, whichever is larger: 2 d min(kx, ky) parameters a site.

    The last step of Algorithm 1. Outputs stay; what remains trains as a low-rank C·W. A domain of
    joint mode leaves its basis by this, with factors of its own.
    """
    forms = CovNormMap | JointMap
    adapters = [a for _, a in net.domain(name).adapters.items() if isinstance(a.A, forms)]
    if not adapters:
        raise CovNormError(f"domain {name!r} has no M to absorb: cn.normalize_ it first")
    absorbed = [a.A.absorbed().train(net.training) for a in adapters]
    for adapter, map_ in zip(adapters, absorbed, strict=True):
        adapter.A = map_
    net.domain(name).basis = None


def _moments_for(site: str, A: LinearMap, moments: dict[str, Moments]) -> Moments:
    x, d = moments.get(site), A.factors[0].shape[1]
    if x is None or x.n == 0 or x.d != d:
        raise CovNormError(
            f"site {site!r}: needs moments of {d} features, got {x!r}: cn.collect them"
        )
    return x


def _check_metric(metric: str, gradients: Any, M: str | None, preset: str) -> None:
    if metric not in get_args(Metric):
        raise CovNormError(f"metric={metric!r}: {choices(metric, get_args(Metric))}")
    if metric == "variance" and gradients is not None:
        raise CovNormError("gradients= are for metric='loss': give that too")
    if metric == "loss" and gradients is None:
        raise CovNormError("metric='loss' needs gradients=: cn.collect_gradients them")
    if metric == "loss" and (M not in (None, "closed-form") or preset != "paper"):
        raise CovNormError("metric='loss' has its own closed-form M: leave out M= and preset=")


def _pair(ranks: Any, site: str) -> tuple[int, int] | None:
    if ranks is not None and (not isinstance(ranks, tuple | list) or len(ranks) != 2):
        raise CovNormError(f"site {site!r}: ranks {ranks!r}, give (kx, ky)")
    return None if ranks is None else (ranks[0], ranks[1])


def _in_loss(
    old: LinearMap,
    moments: Moments,
    G: Tensor,
    ranks: tuple[int, int] | None,
    t: float,
    site: str,
) -> CovNormMap:
    """The map of `loss_normalization`; ranks by the share t of the loss, where none are given."""
    A, b = (v.cpu().to(moments.mean) for v in (old.matrix(), old.offset))
    if not (A.isfinite().all() and b.isfinite().all()):
        raise CovNormError(f"site {site!r}: A holds NaN or Inf: train the domain anew")
    x, mu_y = PCA.of(moments), A @ moments.mean + b
    kx, ky = ranks or (len(x.E), by_variance(loss_normalization(A, x, G, mu_y)[1], t))
    check_ranks(kx, ky, A.shape[1], min(A.shape), site, least=0)
    return CovNormMap.from_factors(old.spatial, loss_normalization(A, x, G, mu_y, ky, kx)[0])


def _normalized(
    old: LinearMap,
    moments: Moments,
    ranks: tuple[int, int] | None,
    preset: Preset,
    site: str,
    generator: torch.Generator | None,
) -> CovNormMap:
    A, b = (t.cpu().to(moments.mean) for t in (old.matrix(), old.offset))
    if not (A.isfinite().all() and b.isfinite().all()):
        raise CovNormError(f"site {site!r}: A holds NaN or Inf: train the domain anew")
    x, y = PCA.of(moments), PCA.of(moments.transform(A, b))
    t = preset.variance
    kx, ky = ranks or (preset.rank_rule(x.E, t), preset.rank_rule(y.E, t))
    check_ranks(kx, ky, len(x.E), len(y.E), site)
    factors = covariance_normalization(A, x, y, kx, ky, preset.M, preset.scaled, generator)
    new = CovNormMap.from_factors(old.spatial, factors)
    new.bias.mul_(preset.mean_sign)
    return new


def _preset(name: str, variance: float | None, M: Any, tune: Any) -> Preset:
    if name not in PRESETS:
        raise CovNormError(f"preset={name!r}: {choices(name, PRESETS)}")
    given = {"variance": variance, "M": M, "tune": tune}
    if tune not in (None, "M", "all"):
        raise CovNormError(f"tune={tune!r}: {choices(tune, ('M', 'all'))}")
    if variance is not None:
        check_threshold(variance)
    return replace(PRESETS[name], **{k: v for k, v in given.items() if v is not None})


def _observer(
    site: str, spatial: bool, moments: Moments
) -> Callable[[nn.Module, tuple[Tensor]], None]:
    """A hook that takes in what a map sees from this thread; other threads' calls are not ours."""
    thread = threading.get_ident()

    def observe(_: nn.Module, args: tuple[Tensor]) -> None:
        if threading.get_ident() != thread:
            return
        x = args[0]
        try:
            moments.update(x if spatial else x.reshape(-1, x.shape[-1]), images=len(x))
        except CovNormError as error:
            raise CovNormError(f"site {site!r}: {error}") from None

    return observe
