"""Make new domains: a new head, and copies of norms of the backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from ..adapters import Adapter, Layer, WeightAdapter
from ..errors import CovNormError
from .domain import Domain, Network, class_names
from .routing import plain_copy
from .sites import copied_norms


def make_domain(
    net: Network,
    name: str,
    adapters: dict[str, Adapter],
    classes: Sequence[str] | int | None,
    own: nn.Module | None,
    preprocessing: Any,
    weights: Mapping[str, WeightAdapter],
    norms: str,
) -> Domain:
    """Return a new domain for a network, which does not change.

    norms: which norms of the backbone it copies, as in `copied_norms`.
    """
    names = class_names(classes)
    head = None
    if net.head_name is not None and names is not None:
        head = fresh_head(net.backbone.get_submodule(net.head_name), len(names))
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
    originals = copied_norms(net.backbone, net.sites, norms)
    copies = {n: plain_copy(norm).requires_grad_(True) for n, norm in originals.items()}
    anchor = cast(Layer, net.backbone.get_submodule(next(iter(net.sites)))).weight
    domain = Domain(name, adapters, copies, head, names, own, preprocessing, weights)
    for part in (domain.adapters, domain.head, domain.own):  # norms keep the backbone's dtype
        if part is not None:
            part.to(anchor.device, anchor.dtype)
    return domain.train(net.training)


def fresh_head(layer: nn.Module, classes: int) -> nn.Module:
    """Return a new head that replaces a Linear or Conv2d layer. It is never grouped."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, classes)
    kept = ("in_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
    return nn.Conv2d(out_channels=classes, **{name: getattr(layer, name) for name in kept})
