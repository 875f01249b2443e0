"""Collect the moments of A's input at every site: step 2 of the pipeline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..adapters import LinearMap
from ..errors import CovNormError, at_site
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode, stepwise
from ..stats.moments import Moments
from ..training.batches import images_of


@torch.no_grad()
def collect(net: MultiDomainNetwork, name: str, loader: Iterable[Any]) -> dict[str, Moments]:
    """Return {site: moments of A's input x} over every position of every image, in eval mode.

    The loader yields (images, labels) or images. The output's moments follow from y = A x + b. To
    see progress, wrap the loader. With several processes, give each its shard, which may be empty,
    and call `Moments.all_reduce_` afterwards.
    """
    device = next(net.backbone.parameters()).device
    maps = maps_of(net, name)
    moments = {site: Moments(A.factors[0].shape[1], device) for site, A in maps.items()}

    def observe(site: str, x: Tensor) -> None:
        rows = x if maps[site].spatial else x.reshape(-1, x.shape[-1])
        with at_site(site):
            moments[site].update(rows, images=len(x))

    with watching_inputs(maps, observe), eval_mode(net.backbone, net.domain(name)), stepwise():
        for batch in loader:
            net(images_of(batch).to(device), domain=name)
    return moments


def maps_of(net: MultiDomainNetwork, name: str) -> dict[str, LinearMap]:
    """Return {site: A} of a domain that has at least one."""
    maps = net.domain(name).maps
    if not maps:
        raise CovNormError(
            f"domain {name!r} has no matrix A: add it with adapter='residual', 'parallel' or 'conv'"
        )
    return maps


@contextlib.contextmanager
def watching_inputs(
    maps: Mapping[str, LinearMap], observe: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``observe(site, x)`` with the input of every A that runs in this thread."""
    thread = threading.get_ident()

    def hook(site: str) -> Callable[..., None]:
        def see(_: Any, args: tuple[Tensor]) -> None:
            if threading.get_ident() == thread:
                observe(site, args[0])

        return see

    hooks = [A.register_forward_pre_hook(hook(site)) for site, A in maps.items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def moments_at(site: str, A: LinearMap, moments: Mapping[str, Moments]) -> Moments:
    """Return the moments of a site's x; an error if they are missing, empty or do not fit A."""
    x, d = moments.get(site), A.factors[0].shape[1]
    if x is None or x.n == 0 or x.d != d:
        raise CovNormError(
            f"site {site!r} needs moments of {d} features, got {x!r}: use cn.collect"
        )
    return x
