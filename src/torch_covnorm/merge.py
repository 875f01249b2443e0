"""Fold a domain into the backbone's own layers: a plain network, equal outputs, no added cost."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .adapters import Adapter, centre, fold
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
    """``W' = T W`` with ``T = gain + F_m … F_1``, plus ``G_l … G_1`` at the centre tap;
    ``b' = T b + shift``. In float64, rounded once.
    """
    if adapter.idle:
        return
    weight = layer.weight.double()
    folded = fold([copy.deepcopy(adapter).double()], site.d_in, site.d_out, weight)
    T, P = _product(folded.series), _product(folded.parallel)
    if isinstance(layer, nn.Conv2d) and layer.groups > 1 and not (T is None and P is None):
        weight = _ungrouped(weight, layer.groups)
        layer.groups = 1
    gain, shift = folded.gain[0], folded.shift[0]
    scaled = gain.view(-1, *[1] * (weight.ndim - 1)) * weight
    if T is not None:
        scaled = scaled + torch.einsum("oi,i...->o...", T, weight)
    if P is not None and isinstance(layer, nn.Conv2d):
        row, column = centre(layer)
        scaled[:, :, row, column] += P
    elif P is not None:
        scaled = scaled + P
    if layer.bias is not None:
        old = layer.bias.double()
        shift = shift + gain * old + (0 if T is None else T @ old)
    layer.weight = nn.Parameter(scaled.to(layer.weight.dtype))
    layer.bias = nn.Parameter(shift.to(layer.weight.dtype))


def _product(factors: tuple[Tensor, ...]) -> Tensor | None:
    if not factors:
        return None
    out = factors[0][0]
    for factor in factors[1:]:
        out = factor[0] @ out
    return out


def _ungrouped(weight: Tensor, groups: int) -> Tensor:
    """(d_out, d_in/g, h, w) → (d_out, d_in, h, w), zero outside each group's block."""
    blocks = weight.chunk(groups)
    rows, columns = blocks[0].shape[:2]
    out = weight.new_zeros(rows * groups, columns * groups, *weight.shape[2:])
    for g, block in enumerate(blocks):
        out[g * rows : (g + 1) * rows, g * columns : (g + 1) * columns] = block
    return out
