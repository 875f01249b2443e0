"""Fold a domain into the layers of the backbone: a plain network with the same outputs."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..adapters import Adapter, JointMap, Layer, Site, fold, merged_weight
from ..errors import CovNormError
from .domain import Domain, Network
from .routing import plain_copy


@torch.no_grad()
def merge(net: Network, domain: Domain) -> nn.Module:
    """Return a copy of the backbone, in eval mode, that computes ``net(x, domain=…)``.

    Series and 1×1 adapters multiply the layer's weight, parallel ones add to its center tap, both
    together with B1 and B2. The norms of the copy are the domain's. A grouped layer becomes
    ungrouped, because its product with a full A is dense. If the domain has an `own` module that
    runs after the backbone, the result is ``nn.Sequential(backbone, own)``.
    """
    plain = plain_copy(net.backbone)
    for name, weight in domain.weights.items():
        layer = plain.get_submodule(name)
        for key, value in weight.parameters_for(layer).items():
            setattr(layer, key, nn.Parameter(value.clone()))
    for name, site in net.sites.items():
        _fold_into_(cast(Layer, plain.get_submodule(name)), site, domain.adapters[name])
    for name, norm in domain.norms.items():
        plain.get_submodule(name).load_state_dict(norm.state_dict())
    if net.head_name is not None:
        head = nn.Identity() if domain.head is None else copy.deepcopy(domain.head)
        old = plain.get_submodule(net.head_name)
        for name, module in list(plain.named_modules(remove_duplicate=False)):
            if module is old:
                plain.set_submodule(name, head)
    if domain.own is not None and domain.runs_own:
        plain = nn.Sequential(plain, copy.deepcopy(domain.own))
    return plain.requires_grad_(False).eval()


def _fold_into_(layer: Layer, site: Site, adapter: Adapter) -> None:
    """Fold an adapter into the weight and bias of a layer: in float64, rounded once."""
    if adapter.idle:
        return
    if is_parametrized(layer):
        raise CovNormError(
            f"site {site.name!r}: its weight is parametrized, so the adapter cannot be folded into "
            "it. Remove the parametrization first."
        )
    adapter, layer64 = copy.deepcopy(adapter).cpu().double(), copy.deepcopy(layer).cpu().double()
    if isinstance(adapter.A, JointMap):  # the copy still refers to the original factors
        adapter.A.share(copy.deepcopy(adapter.A.shared).cpu().double())
    weight, bias = merged_weight(layer64, fold([adapter], site, layer64.weight))
    if isinstance(layer, nn.Conv2d) and weight.shape[1] == layer.in_channels:
        layer.groups = 1
    layer.bias = nn.Parameter(bias.to(layer.weight))
    layer.weight = nn.Parameter(weight.to(layer.weight))
    if type(layer) not in (nn.Conv2d, nn.Linear):
        _check_subclass(layer, layer64, adapter, site)


def _check_subclass(layer: Layer, before: Layer, adapter: Adapter, site: Site) -> None:
    """Compare both ways on a batch, because a subclass may change its weight as it runs."""
    size: list[int] = []
    if isinstance(layer, nn.Conv2d):
        spans = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
        size = [d * (k - 1) + 1 + 2 * s for k, d, s in spans]
    x = torch.randn(2, site.d_in, *size).double()
    expected = adapter.eval()(before, x)
    merged = copy.deepcopy(layer).cpu().double()(x)
    if not torch.allclose(merged, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise CovNormError(
            f"site {site.name!r}: {type(layer).__name__} changes its weight as it runs, so the "
            "adapter cannot be folded into it. Leave it out of sites=, or do not merge."
        )
