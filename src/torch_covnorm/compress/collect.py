"""Collect the moments of A's input (line 2 of Algorithm 1); find and replace a domain's A's."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..adapters import LinearMap
from ..errors import CovNormError, at_site
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode, stepwise
from ..stats.moments import Moments
from ..training.batches import as_loader


@torch.no_grad()
def collect(net: MultiDomainNetwork, name: str, loader: Iterable[Any]) -> dict[str, Moments]:
    """Return {site: moments of A's input x} over every position of every image, in eval mode.

    The loader yields (images, labels) or images; wrap it to see progress. The output's moments
    follow by eq. 2. With several processes, give each its shard, which may be empty, and call
    `Moments.all_reduce_` afterwards.
    """
    device = next(net.backbone.parameters()).device
    maps, thread = maps_of(net, name), threading.get_ident()
    moments = {site: Moments(A.factors[0].shape[1], device) for site, A in maps.items()}

    def observe(site: str, _: Any, args: tuple[Tensor]) -> None:
        if threading.get_ident() != thread:
            return
        x = args[0]
        with at_site(site):
            rows = x if maps[site].spatial else x.reshape(-1, x.shape[-1])
            moments[site].update(rows, images=len(x))

    with ExitStack() as hooks, eval_mode(net.backbone, net.domain(name)), stepwise():
        for site, A in maps.items():
            hooks.enter_context(A.register_forward_pre_hook(partial(observe, site)))
        for images, _ in as_loader(loader, net.domain(name).preprocessing, labels=False):
            net(images.to(device), domain=name)
    return moments


def maps_of(net: MultiDomainNetwork, name: str) -> dict[str, LinearMap]:
    """Return {site: A} of a domain that has at least one."""
    maps = net.domain(name).maps
    if not maps:
        raise CovNormError(
            f"domain {name!r} has no matrix A: add it with adapter='residual', 'parallel' or 'conv'"
        )
    return maps


def replace_maps_(
    net: MultiDomainNetwork, name: str, new: Mapping[str, LinearMap], basis: str | None = None
) -> None:
    """Give sites of a domain new maps, which share the factors of `basis`, if one is named."""
    domain = net.domain(name)
    for site, map_ in new.items():
        domain.adapters[site].A = map_.train(net.training)
    domain.basis = basis


def moments_at(site: str, A: LinearMap, moments: Mapping[str, Moments]) -> Moments:
    """Return the moments of a site's x; an error if they are missing, empty or do not fit A."""
    x, d = moments.get(site), A.factors[0].shape[1]
    if x is None or x.n == 0 or x.d != d:
        raise CovNormError(
            f"site {site!r} needs moments of {d} features, got {x!r}: use cn.collect"
        )
    return x
