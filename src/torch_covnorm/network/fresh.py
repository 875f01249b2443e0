"""Make new domains: untrained adapters, a new head, and copies of the backbone's norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from ..adapters import Adapter, WeightAdapter, build, fresh_config
from ..errors import CovNormError
from .domain import Domain, class_names
from .protocol import Network
from .routing import plain_copy
from .sites import Layer, Site, find_norms


def fresh_adapters(
    sites: Mapping[str, Site], adapter: str, rank: int | float | None
) -> dict[str, Adapter]:
    """Return untrained adapters by site; see `MultiDomainNetwork.add_domain`."""
    adapters = {}
    for name, site in sites.items():
        config = fresh_config(adapter, site.d_in, site.d_out, site.norm_behind is None, rank)
        adapters[name] = build(config, site.spatial, site.d_in, site.d_out, name)
    return adapters


def make_domain(
    net: Network,
    name: str,
    adapters: dict[str, Adapter],
    classes: Sequence[str] | int | None,
    own: nn.Module | None,
    preprocessing: Any,
    weights: Mapping[str, WeightAdapter],
) -> Domain:
    """Return a new domain for a network, which does not change."""
    names = class_names(classes)
    head = None
    if net.head_name is not None and names is not None:
        head = fresh_head(_layer(net, net.head_name), len(names))
    elif net.head_name is not None and own is None:
        raise CovNormError(
            f"domain {name!r} needs a head: give classes= (names or a number) or an own= module, "
            "or build the network with head=None"
        )
    elif net.head_name is None and own is None and isinstance(classes, int):
        raise CovNormError(
            f"domain {name!r}: {classes} classes, but this network has no head. Name the layer "
            "with MultiDomainNetwork(…, head=name), or give own=."
        )
    norms = find_norms(net.backbone)
    copies = {n: plain_copy(norm).requires_grad_(True) for n, norm in norms.items()}
    anchor = _layer(net, next(iter(net.sites))).weight
    domain = Domain(name, adapters, copies, head, names, own, preprocessing, weights)
    for part in (domain.adapters, domain.head, domain.own):  # norms keep the backbone's dtype
        if part is not None:
            part.to(anchor.device, anchor.dtype)
    return domain.train(net.training)


def fresh_head(layer: nn.Linear | nn.Conv2d, classes: int) -> nn.Module:
    """Return a new head that replaces a Linear or Conv2d layer. It is never grouped."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, classes)
    return nn.Conv2d(
        layer.in_channels,
        classes,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        padding_mode=layer.padding_mode,
    )


def _layer(net: Network, name: str) -> Layer:
    return cast(Layer, net.backbone.get_submodule(name))
