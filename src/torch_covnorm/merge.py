"""Fold a domain into the backbone's own layers: a plain network, equal outputs, no added cost."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from .adapters import Adapter, fold, merged_weight
from .domain import Domain
from .routing import plain_copy
from .sites import Layer, Site

if TYPE_CHECKING:
    from .network import MultiDomainNetwork


@torch.no_grad()
def merge(net: MultiDomainNetwork, domain: Domain) -> nn.Module:
    """A copy of the backbone, in eval mode, that computes what ``net(x, domain=…)`` computes.

    Series and 1×1 adapters multiply into the layer's weight, parallel ones add to its centre tap,
    B1 and B2 go along; the backbone's own norms take the domain's values. A grouped layer becomes
    an ungrouped one, since its product with a full A is dense. A domain whose `own` module runs
    behind the backbone gives ``nn.Sequential(backbone, own)``.
    """
    plain = plain_copy(net.backbone)
    for name, site in net.sites.items():
        _fold_into_(cast(Layer, plain.get_submodule(name)), site, domain.adapters[name])
    for name, norm in domain.norms.items():
        plain.get_submodule(name).load_state_dict(norm.state_dict())
    if net.head_name is not None:
        head = nn.Identity() if domain.head is None else copy.deepcopy(domain.head)
        plain.set_submodule(net.head_name, head)
    if domain.own is not None and domain.runs_own:
        plain = nn.Sequential(plain, copy.deepcopy(domain.own))
    return plain.requires_grad_(False).eval()


def _fold_into_(layer: Layer, site: Site, adapter: Adapter) -> None:
    """Give a layer the weight and bias that hold its adapter: in float64, rounded once."""
    if adapter.idle:
        return
    dtype = layer.weight.dtype
    folded = fold([copy.deepcopy(adapter).double()], site.d_in, site.d_out, layer.weight.double())
    weight, bias = merged_weight(layer, folded)
    if isinstance(layer, nn.Conv2d) and weight.shape[1] == layer.in_channels:
        layer.groups = 1
    layer.weight = nn.Parameter(weight.to(dtype))
    layer.bias = nn.Parameter(bias.to(dtype))
