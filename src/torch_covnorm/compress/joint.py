"""Joint mode: one global PCA of x and of y over several domains; C and W shared, M for each.

The global moments come from those of the domains (eq. 10) and are kept with the basis, so that a
further domain can join later with nothing else stored: merging is exact, recursive equals batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..adapters import JointMap, LinearMap, SharedFactors, SharedMap
from ..errors import CovNormError, choices
from ..network.basis import Basis
from ..network.domain import Domain, check_name
from ..network.network import MultiDomainNetwork
from ..stats.decomposition import MiniAdaptation, mini_adaptation
from ..stats.moments import Moments
from ..stats.pooling import Felt, all_felt, felt_by, pooled
from ..stats.ranks import check_threshold, rank_of
from .geometric import full_maps, joint_svd
from .gradients import GradientMoments, Metric, gradients_at
from .sharing import captured, factors_of

Count = Literal["positions", "images"]
Maps = dict[str, dict[str, JointMap]]  # by domain, by site


@dataclass(frozen=True)
class Joined:
    """What `join_` did.

    captured: {domain: {site: (of x, of y)}}, the shares of its variance, in 0…1, that the basis
        held when the domain came; a new basis, and one that then grew, holds more or as much.
    grown: an existing basis was made anew from the moments of all.
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
    """Let domains share one C and W a site (eq. 8 with the PCAs of eq. 10); each keeps an M.

    Args:
        names: domains with an A at every site, any subset of the network's.
        moments: {domain: {site: moments of A's input}}, from `collect`.
        variance: the threshold t of the rank rule over the global spectra, 0.99.
        ranks: {site: (kx, ky)} instead of the rule.
        M: as for `normalize_`; "none" leaves out the M's: one map for all, of which only the
            constant is the domain's own (the authors' sketch of learning without forgetting).
        basis: its name. Where the network has it already, the domains join that one.
        count: N_i of eq. 10: "positions" of A's input, or "images".
        grow: a domain of which an existing basis captures less than this, at any site, makes it
            grow: C and W anew from the moments of all. The M's of earlier domains then stand for
            what they stood for as well as the new basis can, and want tuning. None: never.
        metric: "variance" (the paper), or "loss": C and W are of the directions that the domains'
            losses feel most, on the mean (`loss_color`, `loss_whiten`), and t is a share of that.
            It needs `gradients`: {domain: {site: …}}, from `collect_gradients`.

    M trains afterwards, with the constant, the norms and the head; C and W are frozen. A domain
    that leaves a basis (`absorb_`) stays in its moments. All is computed first; on an error the
    network is as it was.
    """
    names = [names] if isinstance(names, str) else list(names)
    old: Basis | None = net.bases[basis] if check_name(basis) in net.bases else None
    settings = join_settings(old, variance, count, names, metric)
    _check_joinable(net, names, old)
    in_loss = settings["metric"] == "loss"
    if gradients is not None and not in_loss:
        raise CovNormError("gradients= are for metric='loss': give that too")
    maps = {name: _maps(net.domain(name)) for name in names}
    settings["ranks"] |= given_ranks(ranks or {}, maps[names[0]])
    x, y = {}, {}
    for name in names:
        x[name] = _moments_of(moments, name, maps[name], settings["count"])
        y[name] = {s: x[name][s].transform(A.matrix(), A.offset) for s, A in maps[name].items()}
    all_x, all_y = pooled(old.x if old else {}, x), pooled(old.y if old else {}, y)
    felt: dict[str, dict[str, Felt]] = {}
    for name in names if in_loss else ():
        at = {s: gradients_at(s, A, (gradients or {}).get(name)) for s, A in maps[name].items()}
        felt[name] = {s: felt_by(A.matrix(), at[s], x[name][s].n) for s, A in maps[name].items()}
    total = all_felt(old.felt if old else {}, felt)
    G = {s: f.G / all_x[s].n for s, f in total.items()}

    factors = dict(old.factors.items()) if old else {}
    found = {n: captured(factors, x[n], y[n], felt.get(n), G) for n in names}
    shares = [share for sites in found.values() for pair in sites.values() for share in pair]
    renew = old is None or (grow is not None and min(shares) < grow)
    if renew:
        factors = {
            s: factors_of(all_x[s], all_y[s], total.get(s), settings, s, A.bias)
            for s, A in maps[names[0]].items()
        }
    if old is None:
        found = {n: captured(factors, x[n], y[n], felt.get(n), G) for n in names}
    new: Maps = {
        n: {s: _map(A, factors[s], x[n][s], M, generator, G.get(s)) for s, A in maps[n].items()}
        for n in names
    }
    if renew:
        for name, domain in net.domains.items():
            if old is not None and domain.basis == basis and name not in new:
                new[name] = {s: _moved(A, factors[s], G.get(s)) for s, A in _maps(domain).items()}
    net.bases[basis] = Basis(basis, "covnorm", factors, all_x, all_y, settings, total)
    _adopt_(net, new, basis)
    return Joined(basis, net.basis(basis).ranks, found, old is not None and renew, tuple(new))


@torch.inference_mode(False)
@torch.no_grad()
def join_svd_(
    net: MultiDomainNetwork,
    names: Sequence[str] | str,
    rank: int | float = 0.25,
    basis: str = "joint-svd",
) -> Basis:
    """Joint SVD (Rebuffi 2018): one frozen W a site for all domains, a C_i for each, to be tuned.

    A domain then costs r d parameters a site, and the network r d once.
    """
    if check_name(basis) in net.bases:
        raise CovNormError(f"basis {basis!r} exists already: give another name as basis=")
    names = [names] if isinstance(names, str) else list(names)
    _check_joinable(net, names, None)
    maps = {name: full_maps(net.domain(name)) for name in names}
    factors: dict[str, SharedFactors] = {}
    new: Maps = {name: {} for name in names}
    for site, first in maps[names[0]].items():
        matrices = [maps[name][site].matrix().cpu() for name in names]
        d_out, d_in = matrices[0].shape
        whole = isinstance(rank, int)  # the stack may have a higher rank than one A
        r = rank_of(rank, d_out * len(names) if whole else d_out, d_in)
        C, W = joint_svd(matrices, r)
        factors[site] = SharedFactors(W.to(first.bias), None, first.bias.new_zeros(W.shape[1]))
        for name, C_i in zip(names, C, strict=True):
            old = maps[name][site]
            map_ = JointMap(old.spatial, len(C_i), factors[site])
            new[name][site] = _filled(map_, C_i, old.bias)
    net.bases[basis] = Basis(basis, "svd", factors, settings={"rank": rank})
    _adopt_(net, new, basis)
    return net.basis(basis)


def _map(
    old: LinearMap,
    shared: SharedFactors,
    x: Moments,
    M: MiniAdaptation | Literal["none"],
    generator: torch.Generator | None,
    G: Tensor | None,
) -> JointMap:
    """The domain's own part: M, and the constant that gives its output the right mean."""
    A, b = (t.to(x.mean) for t in (old.matrix(), old.offset))
    assert shared.C is not None
    W, C, mu = (t.to(x.mean) for t in (shared.W, shared.C, shared.mu_x))
    if M == "none":
        map_: JointMap = SharedMap(old.spatial, len(C), shared)
        mini = map_.M.to(C)
    else:
        map_ = JointMap(old.spatial, len(C), shared)
        mini = mini_adaptation(M, A, W, C, x.covariance, generator, G)
    bias = A @ x.mean + b - C @ (mini @ (W @ (x.mean - mu)))
    return _filled(map_, mini, bias.to(old.bias))


def _moved(old: JointMap, shared: SharedFactors, G: Tensor | None) -> JointMap:
    """A domain's map on a new basis: the nearest M, and the same output at the basis's mean."""
    A, b = (t.cpu().double() for t in (old.matrix(), old.offset))
    assert shared.C is not None
    new = type(old)(old.spatial, len(shared.C), shared)
    W, C, mu = (t.cpu().double() for t in (shared.W, shared.C, shared.mu_x))
    mini = mini_adaptation("closed-form", A, W, C, G=G)
    return _filled(new, mini, (A @ mu + b).to(old.bias))


def _filled(map_: JointMap, M: Tensor, bias: Tensor) -> JointMap:
    map_.to(bias)
    if not isinstance(map_, SharedMap):
        map_.M.copy_(M)
    map_.bias.copy_(bias)
    map_.train_only_(("M", "bias"))
    return map_


def _adopt_(net: MultiDomainNetwork, maps: Maps, basis: str) -> None:
    for name, sites in maps.items():
        domain = net.domain(name)
        for site, map_ in sites.items():
            domain.adapters[site].A = map_.train(net.training)
        domain.basis = basis


def _maps(domain: Domain) -> dict[str, Any]:
    maps = domain.maps
    for site, A in maps.items():
        if not (A.matrix().isfinite().all() and A.offset.isfinite().all()):
            raise CovNormError(
                f"domain {domain.name!r}, site {site!r}: A holds NaN or Inf: train it anew"
            )
    return dict(maps)


def given_ranks(ranks: Mapping[str, tuple[int, int]], sites: Iterable[str]) -> dict[str, list[int]]:
    """Ranks that hold instead of the rule, now and when the basis grows; as plain JSON."""
    for site, pair in ranks.items():
        if site not in sites:
            raise CovNormError(f"ranks for site {site!r}: {choices(site, sites)}")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise CovNormError(f"site {site!r}: ranks {pair!r}, give (kx, ky)")
    return {site: list(pair) for site, pair in ranks.items()}


def join_settings(
    old: Basis | None,
    variance: float | None,
    count: Count | None,
    names: Sequence[str],
    metric: Metric | None = None,
) -> dict[str, Any]:
    """The basis's own settings; a second join may not change them."""
    given = {"variance": variance, "count": count, "metric": metric}
    if old is not None and old.decomposition != "covnorm":
        raise CovNormError(f"basis {old.name!r} is of joint SVD: give another name as basis=")
    settings: dict[str, Any] = {"variance": 0.99, "count": "positions", "metric": "variance"}
    settings["ranks"] = {}
    settings |= copy.deepcopy(old.settings) if old else {}
    for key, value in given.items():
        if old is not None and value is not None and value != settings[key]:
            raise CovNormError(
                f"basis {old.name!r} has {key}={settings[key]!r}: {', '.join(names)} cannot join "
                f"it with {value!r}"
            )
        settings[key] = settings[key] if value is None else value
    check_threshold(settings["variance"])
    if settings["count"] not in ("positions", "images"):
        raise CovNormError(f"count={count!r}: {choices(count, ('positions', 'images'))}")
    if settings["metric"] not in get_args(Metric):
        raise CovNormError(f"metric={metric!r}: {choices(metric, get_args(Metric))}")
    return settings


def _check_joinable(net: MultiDomainNetwork, names: Sequence[str], basis: Basis | None) -> None:
    """Refuse domains without A's, twice the same, or with A's in different places."""
    if not names or len(set(names)) != len(names):
        raise CovNormError(f"names={list(names)!r}: give the domains to join, each once")
    kinds = {
        n: {site: a.kind for site, a in net.domain(n).adapters.items() if a.A is not None}
        for n in [*names, *(n for n, d in net.domains.items() if basis and d.basis == basis.name)]
    }
    for name, sites in kinds.items():
        if basis is not None and name in names and net.domain(name).basis == basis.name:
            raise CovNormError(f"domain {name!r} shares basis {basis.name!r} already")
        if not sites:
            raise CovNormError(f"domain {name!r} has no matrix A to join: adapter='residual'")
        if sites != kinds[names[0]] or (basis is not None and set(sites) != set(basis.factors)):
            raise CovNormError(
                f"domains {names[0]!r} and {name!r} have adapters of different kinds or sites: "
                "only like with like can share a basis"
            )


def _moments_of(
    moments: Mapping[str, Mapping[str, Moments]],
    name: str,
    maps: Mapping[str, LinearMap],
    count: Count,
) -> dict[str, Moments]:
    """The moments of a domain's x at every site, with N_i as it shall count."""
    out = {}
    for site, A in maps.items():
        d = A.factors[0].shape[1]
        x = moments.get(name, {}).get(site)
        if x is None or x.n == 0 or x.d != d:
            raise CovNormError(
                f"domain {name!r}, site {site!r}: needs moments of {d} features, got {x!r}: "
                "cn.collect them"
            )
        if count == "images" and x.images == 0:
            raise CovNormError(
                f"domain {name!r}, site {site!r}: its moments do not know their images: cn.collect "
                "them, or count='positions'"
            )
        out[site] = x.weighted(x.images) if count == "images" else x
    return out
