"""Joint mode: one global PCA of x and of y over several domains; C and W shared, one M each.

The global moments are merged from those of the domains (eq. 10) and kept with the basis. A further
domain can join later with nothing else stored: merging is exact, so recursive equals batch. Joint
SVD, which the paper compares with, shares only W and keeps no moments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..adapters import JointMap, LinearMap, SharedFactors, SharedMap
from ..errors import CovNormError, at_site, check_choice
from ..network.basis import Basis
from ..network.domain import Domain, check_name
from ..network.network import MultiDomainNetwork
from ..stats import solver
from ..stats.decomposition import MiniAdaptation, closed_form, mini_adaptation, pooled_bases
from ..stats.moments import Moments
from ..stats.pooling import LossMetric, pooled
from ..stats.ranks import check_rank_pairs, check_ranks, check_threshold, rank_of
from .collect import moments_at, replace_maps_
from .geometric import full_maps, joint_svd
from .gradients import GradientMoments, Metric, gradients_at

Count = Literal["positions", "images"]


@dataclass(frozen=True)
class Joined:
    """The result of `join_`.

    captured: {domain: {site: (of x, of y)}}, the shares of a domain's variance or loss, in 0…1,
        that the basis held when the domain joined. A new or grown basis holds at least as much.
    grown: whether an existing basis was rebuilt from the moments of all domains.
    retune: the domains whose M is new, or no longer the one that was tuned.
    """

    basis: str
    ranks: dict[str, tuple[int, int]]
    captured: dict[str, dict[str, tuple[float, float]]]
    grown: bool = False
    retune: tuple[str, ...] = ()


@torch.inference_mode(False)
@torch.no_grad()
def join_(
    net: MultiDomainNetwork,
    names: Sequence[str] | str,
    moments: Mapping[str, Mapping[str, Moments]],
    variance: float | None = None,
    *,
    ranks: Mapping[str, tuple[int, int]] | None = None,
    M: MiniAdaptation | Literal["none"] = "closed-form",
    basis: str = "joint",
    count: Count | None = None,
    grow: float | None = 0.95,
    metric: Metric | None = None,
    gradients: Mapping[str, Mapping[str, GradientMoments]] | None = None,
    generator: torch.Generator | None = None,
) -> Joined:
    """Let domains share one C and W per site (eq. 8 with the PCAs of eq. 10); each keeps an M.

    Args:
        names: domains with an A at every site, any subset of the network's.
        moments: {domain: {site: moments of A's input}}, from `collect`.
        variance: the threshold t of the rank rule over the global spectra, 0.99 by default.
        ranks: {site: (kx, ky)}, used instead of the rule at these sites.
        M: as for `normalize_`. "none" leaves out the M's: one map for all domains, which differ
            only in a constant (the authors' sketch of learning without forgetting).
        basis: its name. If the network already has this basis, the domains join it.
        count: N_i of eq. 10: "positions" of A's input, or "images".
        grow: if an existing basis captures less than this share of a new domain at any site, C and
            W are rebuilt from the moments of all domains. The M's of earlier domains are replaced
            by the closest ones in the new basis and need tuning. None never grows.
        metric: "variance" (the paper), or "loss": C and W are the directions to which the domains'
            losses are most sensitive on average, and t is a share of that. It needs `gradients`:
            {domain: {site: …}}, from `collect_gradients`.

    Afterwards M trains with the constant, the norms and the head; C and W are frozen. A domain that
    leaves a basis (`absorb_`) stays in its moments. Everything is computed before anything is
    replaced: after an error the network is unchanged.
    """
    names = [names] if isinstance(names, str) else list(names)
    old: Basis | None = net.bases[basis] if check_name(basis) in net.bases else None
    settings = join_settings(old, variance, count, names, metric)
    _check_joinable(net, names, old)
    in_loss = settings["metric"] == "loss"
    if gradients is not None and not in_loss:
        raise CovNormError("gradients= is for metric='loss': give that too")
    maps = {name: _finite_maps(net.domain(name)) for name in names}
    check_rank_pairs(ranks or {}, maps[names[0]])
    settings["ranks"] |= {site: list(pair) for site, pair in (ranks or {}).items()}
    x = {n: _weighted(n, maps[n], moments.get(n, {}), settings["count"]) for n in names}
    y = {n: {s: x[n][s].transform(A.matrix(), A.offset) for s, A in maps[n].items()} for n in names}
    loss: dict[str, dict[str, LossMetric]] = {}
    for n in names if in_loss else ():
        at = partial(gradients_at, gradients=(gradients or {}).get(n))
        loss[n] = {s: LossMetric.of(A.matrix(), at(s, A), x[n][s].n) for s, A in maps[n].items()}
    before = old or Basis(basis, "covnorm", {})
    all_x, all_y, all_loss = pooled(before.x, x), pooled(before.y, y), pooled(before.felt, loss)
    G = {s: f.G / all_x[s].n for s, f in all_loss.items()}
    roots = {s: solver.roots(mean)[0] for s, mean in G.items()}

    def shares(factors: Mapping[str, SharedFactors], n: str) -> dict[str, tuple[float, float]]:
        R = {s: f.R for s, f in loss.get(n, {}).items()}
        return {s: captured(f, x[n][s], y[n][s], R.get(s), G.get(s)) for s, f in factors.items()}

    factors = dict(before.factors.items())
    found = {n: shares(factors, n) for n in names}
    least = min((v for sites in found.values() for pair in sites.values() for v in pair), default=0)
    renew = old is None or (grow is not None and least < grow)
    if renew:
        factors = {
            s: shared_factors(all_x[s], all_y[s], all_loss.get(s), settings, s, A.bias)
            for s, A in maps[names[0]].items()
        }
    if old is None:
        found = {n: shares(factors, n) for n in names}

    def map_at(s: str, A: LinearMap, of_x: Moments | None, M: Any) -> JointMap:
        return _map(A, factors[s], of_x, M, generator, roots.get(s))

    new = {n: {s: map_at(s, A, x[n][s], M) for s, A in maps[n].items()} for n in names}
    grown = old is not None and renew
    for name in [n for n, d in net.domains.items() if grown and d.basis == basis and n not in new]:
        members = _finite_maps(net.domain(name)).items()
        new[name] = {
            s: map_at(s, A, None, "none" if isinstance(A, SharedMap) else "closed-form")
            for s, A in members
        }
    made = net.bases[basis] = Basis(basis, "covnorm", factors, all_x, all_y, settings, all_loss)
    for name, sites in new.items():
        replace_maps_(net, name, sites, basis)
    return Joined(basis, made.ranks, captured=found, grown=grown, retune=tuple(new))


@torch.inference_mode(False)
@torch.no_grad()
def join_svd_(
    net: MultiDomainNetwork,
    names: Sequence[str] | str,
    rank: int | float = 0.25,
    basis: str = "joint-svd",
) -> Basis:
    """Joint SVD (Rebuffi 2018): one frozen W per site for all domains and a C_i each, to be tuned.

    A domain then costs r d parameters per site, and the network r d once.
    """
    check_new_basis(net, basis)
    names = [names] if isinstance(names, str) else list(names)
    _check_joinable(net, names, None)
    maps = {name: full_maps(net.domain(name)) for name in names}
    factors: dict[str, SharedFactors] = {}
    new: dict[str, dict[str, JointMap]] = {name: {} for name in names}
    for site, first in maps[names[0]].items():
        matrices = [maps[name][site].matrix().cpu() for name in names]
        d_out, d_in = matrices[0].shape
        whole = isinstance(rank, int)  # the stack may have a higher rank than one A
        with at_site(site):
            C, W = joint_svd(matrices, rank_of(rank, d_out * len(names) if whole else d_out, d_in))
        factors[site] = SharedFactors(W.to(first.bias), None, first.bias.new_zeros(W.shape[1]))
        for name, C_i in zip(names, C, strict=True):
            A = maps[name][site]
            new[name][site] = _filled(JointMap(A.spatial, len(C_i), factors[site]), C_i, A.bias)
    net.bases[basis] = Basis(basis, "svd", factors, settings={"rank": rank})
    for name, sites in new.items():
        replace_maps_(net, name, sites, basis)
    return net.basis(basis)


def check_new_basis(net: MultiDomainNetwork, basis: str) -> None:
    """Check that a basis of this name does not exist yet."""
    if check_name(basis) in net.bases:
        raise CovNormError(f"basis {basis!r} already exists: give another name as basis=")


def join_settings(
    old: Basis | None,
    variance: float | None,
    count: Count | None,
    names: Sequence[str],
    metric: Metric | None = None,
) -> dict[str, Any]:
    """Return the settings of a basis as plain JSON; a second join may not change them."""
    if old is not None and old.decomposition != "covnorm":
        raise CovNormError(f"basis {old.name!r} belongs to joint SVD: give another name as basis=")
    settings: dict[str, Any]
    settings = {"variance": 0.99, "count": "positions", "metric": "variance", "ranks": {}}
    settings |= copy.deepcopy(old.settings) if old else {}
    for key, value in {"variance": variance, "count": count, "metric": metric}.items():
        if old is not None and value is not None and value != settings[key]:
            raise CovNormError(
                f"basis {old.name!r} has {key}={settings[key]!r}: {', '.join(names)} cannot join "
                f"it with {value!r}"
            )
        settings[key] = settings[key] if value is None else value
    check_threshold(settings["variance"])
    check_choice("count", settings["count"], get_args(Count))
    check_choice("metric", settings["metric"], get_args(Metric))
    return settings


def shared_factors(
    x: Moments,
    y: Moments,
    loss: LossMetric | None,
    settings: Mapping[str, Any],
    site: str,
    like: Tensor,
) -> SharedFactors:
    """Return the W and C (eq. 7) of a site that all domains share, in the dtype of `like`."""
    with at_site(site):
        bases = pooled_bases(x, y, loss)
        kx, ky = settings["ranks"].get(site) or bases.ranks(settings["variance"])
        check_ranks(kx, ky, x.d, y.d)
    return SharedFactors(*(t.to(like) for t in (bases.W[:kx], bases.C[:, :ky], bases.mu_x)))


def captured(
    factors: SharedFactors, x: Moments, y: Moments, R: Tensor | None, G: Tensor | None
) -> tuple[float, float]:
    """Return the shares of a domain's x and y that a basis holds: of variance, or of loss.

    The loss is measured at x by the domain's R, and at y by the G of all domains (`LossMetric`).
    """
    assert factors.C is not None
    W, C = factors.W.cpu().double(), factors.C.cpu().double()
    of_x, of_y = x.covariance.cpu(), y.covariance.cpu()
    if R is None or G is None:
        return captured_share(W.T, of_x), captured_share(C, of_y)
    root_x, root_G = solver.root(of_x), solver.root(G)  # no floor: G = 0 leaves nothing to capture
    return (
        captured_share(root_x @ W.T, root_x @ R.cpu() @ root_x),
        captured_share(root_G @ C, root_G @ of_y @ root_G),
    )


def captured_share(Q: Tensor, Sigma: Tensor) -> float:
    """Return the share of Sigma (d, d) in the span of Q (d, k): tr UᵀΣU / tr Σ, U orthonormal."""
    total = float(Sigma.trace())
    U, s, _ = solver.svd(Q)
    Q = U[:, s > 1e-9 * s[0]]
    return float((Q * (Sigma @ Q)).sum()) / total if total > 0 else 1.0


def _map(
    old: LinearMap,
    shared: SharedFactors,
    x: Moments | None,
    M: MiniAdaptation | Literal["none"],
    generator: torch.Generator | None,
    root_G: Tensor | None,
) -> JointMap:
    """Return a domain's part: M, and the constant that keeps its output at the mean of x.

    Without moments of x, the mean is the one of the basis.
    """
    assert shared.C is not None
    parts = (old.matrix(), old.offset, shared.W, shared.C, shared.mu_x)
    A, b, W, C, mu = (t.detach().cpu().double() for t in parts)
    mean, Sigma = (mu, None) if x is None else (x.mean.cpu(), x.covariance.cpu())
    if M == "none":
        map_: JointMap = SharedMap(old.spatial, len(C), shared)
        mini = map_.M.to(C)
    else:
        map_ = JointMap(old.spatial, len(C), shared)
        mini = mini_adaptation(M, closed_form(A, W, C, Sigma, root_G), generator)
    bias = A @ mean + b - C @ (mini @ (W @ (mean - mu)))
    return _filled(map_, mini, bias.to(old.bias))


def _filled(map_: JointMap, M: Tensor, bias: Tensor) -> JointMap:
    map_.to(bias)
    if not isinstance(map_, SharedMap):
        map_.M.copy_(M)
    map_.bias.copy_(bias)
    map_.train_only_(("M", "bias"))
    return map_


def _finite_maps(domain: Domain) -> dict[str, Any]:
    for site, A in domain.maps.items():
        if not (A.matrix().isfinite().all() and A.offset.isfinite().all()):
            raise CovNormError(
                f"domain {domain.name!r}, site {site!r}: A contains NaN or Inf: retrain the domain"
            )
    return dict(domain.maps)


def _check_joinable(net: MultiDomainNetwork, names: Sequence[str], basis: Basis | None) -> None:
    """Check that domains have A's, each is named once, and all have them in the same places."""
    if not names or len(set(names)) != len(names):
        raise CovNormError(f"names={list(names)!r}: give the domains to join, each once")
    kinds = {
        n: {site: a.kind for site, a in net.domain(n).adapters.items() if a.A is not None}
        for n in [*names, *(n for n, d in net.domains.items() if basis and d.basis == basis.name)]
    }
    for name, sites in kinds.items():
        if basis is not None and name in names and net.domain(name).basis == basis.name:
            raise CovNormError(f"domain {name!r} already shares basis {basis.name!r}")
        if not sites:
            raise CovNormError(
                f"domain {name!r} has no matrix A to join: add it with adapter='residual'"
            )
        if sites != kinds[names[0]] or (basis is not None and set(sites) != set(basis.factors)):
            raise CovNormError(
                f"domains {names[0]!r} and {name!r} have adapters of different kinds or at "
                "different sites, so they cannot share a basis"
            )


def _weighted(
    name: str, maps: Mapping[str, LinearMap], moments: Mapping[str, Moments], count: Count
) -> dict[str, Moments]:
    """Return the moments of a domain's x at every site, with N_i counted as positions or images."""
    found = {}
    for site, A in maps.items():
        try:
            x = moments_at(site, A, moments)
        except CovNormError as error:
            raise CovNormError(f"domain {name!r}, {error}") from None
        if count == "images" and x.images == 0:
            raise CovNormError(
                f"domain {name!r}, site {site!r}: its moments do not know how many images they "
                "come from: use cn.collect, or count='positions'"
            )
        found[site] = x.weighted(x.images) if count == "images" else x
    return found
