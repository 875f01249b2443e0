"""Adapters that replace the weights of a layer: a trained copy (FNFT), or a mask (Piggyback).

The backbone does not change. The layer runs as a shallow copy of itself that has the domain's
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from ..errors import CovNormError
from .site import Layer

# Piggyback (Mallya 2018): initial value of the scores, and the threshold for keeping a weight.
MASK_START = 1e-2
MASK_THRESHOLD = 5e-3

_BITS = torch.arange(8, dtype=torch.uint8)


def shallow_copy(
    module: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module | None] | None = None,
) -> nn.Module:
    """Return a module that shares everything with `module` except the given parts.

    The copy runs the forward of its class, so it is not routed. `module` does not change.
    """
    # Not copy.copy: it goes through pickling hooks, which parametrized modules refuse.
    other = object.__new__(type(module))
    attributes = {k: v for k, v in vars(module).items() if k != "forward"}
    attributes["_parameters"] = {**module._parameters, **(parameters or {})}
    attributes["_modules"] = {**module._modules, **(children or {})}
    vars(other).update(attributes)
    return other


class WeightAdapter(nn.Module):
    """Base class: the parameters that one domain uses in place of those of one layer."""

    kind: str

    def parameters_for(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the parameters that the layer runs with for this domain, by name."""
        raise NotImplementedError

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors to write to the domain's file, by name."""
        return dict(self.state_dict())


class CopiedWeights(WeightAdapter):
    """A trainable copy of all parameters that a module holds directly, for full fine-tuning."""

    kind = "own"

    def __init__(
        self, layer: nn.Module, tied: dict[nn.Parameter, nn.Parameter] | None = None
    ) -> None:
        """Copy them. `tied` has the copies by original: layers that share one still share it."""
        super().__init__()
        tied = {} if tied is None else tied
        for name, p in layer.named_parameters(recurse=False):
            if p not in tied:
                tied[p] = nn.Parameter(p.detach().clone())
            self.register_parameter(name, tied[p])

    def parameters_for(self, layer: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        return dict(self.named_parameters())


class MaskWeights(WeightAdapter):
    """``W ∘ (scores > 5e-3)``: a binary mask on the weight of a Conv2d or Linear layer.

    The mask is trained through real-valued scores of W's shape. The gradient passes the threshold
    straight through. `pack_` keeps 1 bit per weight, eight per byte. Packed masks are unpacked only
    while they are used. Files hold packed masks only.
    """

    kind = "mask"

    def __init__(self, layer: nn.Module, packed: bool = False) -> None:
        super().__init__()
        weight = layer.get_parameter("weight")
        self.shape = weight.shape
        self.scores: nn.Parameter | None
        self.packed: Tensor | None
        scores = None if packed else nn.Parameter(torch.full_like(weight, MASK_START))
        self.register_parameter("scores", scores)
        bits = torch.zeros(-(-weight.numel() // 8), dtype=torch.uint8, device=weight.device)
        self.register_buffer("packed", bits if packed else None)

    def mask(self) -> Tensor:
        """Return the mask as bool, in the shape of the weight."""
        if self.scores is not None:
            return self.scores.detach() > MASK_THRESHOLD
        assert self.packed is not None
        return unpack(self.packed, self.shape.numel()).view(self.shape)

    def parameters_for(self, layer: nn.Module) -> dict[str, Tensor]:
        weight, mask = layer.get_parameter("weight"), self.mask()
        if self.scores is None or not torch.is_grad_enabled():
            return {"weight": weight * mask}
        straight_through = mask + (self.scores - self.scores.detach())
        return {"weight": weight * straight_through}

    def pack_(self) -> None:
        """Drop the scores and keep the mask."""
        if self.scores is not None:
            self.packed = pack(self.mask())
            self.scores = None

    def unpack_(self, layer: nn.Module) -> None:
        """Recreate the scores of a packed mask for training: MASK_START where kept, else 0."""
        if self.scores is None:
            scores = self.mask().to(layer.get_parameter("weight")) * MASK_START
            self.scores, self.packed = nn.Parameter(scores), None

    def bits(self) -> int:
        """Return the size of the mask in bits."""
        return self.shape.numel()

    def stored(self) -> dict[str, Tensor]:
        return {"packed": pack(self.mask()) if self.packed is None else self.packed}


def weight_adapters(
    backbone: nn.Module, kind: str, head: str | None, packed: bool = False
) -> dict[str, WeightAdapter]:
    """Return new weight adapters for all layers whose weights a domain replaces, by name.

    "own": every module with parameters, except the head and the norms, which are the domain's in
    any case. "mask": those of them that are Conv2d or Linear. Other kinds: none.
    packed: with empty packed masks.
    """
    adapters: dict[str, WeightAdapter] = {}
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in backbone.named_modules():
        holds = any(True for _ in layer.named_parameters(recurse=False))
        if not holds or isinstance(layer, _BatchNorm) or name == head:
            continue
        if kind == "own":
            adapters[name] = CopiedWeights(layer, tied)
        elif kind == "mask" and isinstance(layer, Layer):
            if is_parametrized(layer):
                raise CovNormError(
                    f"layer {name!r}: its weight is parametrized, so it cannot be masked. Remove "
                    "the parametrization first."
                )
            adapters[name] = MaskWeights(layer, packed)
    return adapters


def pack(mask: Tensor) -> Tensor:
    """Pack bools of any shape into uint8 (n / 8, rounded up), the first in the lowest bit."""
    flat = mask.flatten().to(torch.uint8)
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).view(-1, 8)
    return (flat << _BITS.to(flat.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, n: int) -> Tensor:
    """Return the first n bools of what `pack` returned."""
    bits = packed[:, None].bitwise_right_shift(_BITS.to(packed.device)) & 1
    return bits.flatten()[:n].bool()
