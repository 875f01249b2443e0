"""Other weights for a layer of the backbone: a domain's own copy (FNFT), or a mask (Piggyback).

Such an adapter changes the frozen layer instead of adding one behind it. The backbone keeps every
bit: the layer runs as a double of itself, with the domain's parameters in place of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Piggyback (Mallya 2018): real scores start here, and a weight is kept where they exceed this.
MASK_START = 1e-2
MASK_THRESHOLD = 5e-3

_PLACES = torch.arange(8, dtype=torch.uint8)


def double(layer: nn.Module, parameters: Mapping[str, Tensor]) -> nn.Module:
    """The layer with other parameters; all else is shared, and the layer itself is not touched.

    It runs by its class's forward, so a routed layer's double asks nobody.
    """
    other = object.__new__(type(layer))
    other.__dict__.update(vars(layer))
    other.__dict__.pop("forward", None)
    other.__dict__["_parameters"] = {**layer._parameters, **parameters}
    return other


class WeightAdapter(nn.Module):
    """Base of the two: what one domain puts in the place of one layer's parameters."""

    kind: str

    def parameters_for(self, layer: nn.Module) -> dict[str, Tensor]:
        """The parameters with which the layer runs for this domain, by their names."""
        raise NotImplementedError

    def stored(self) -> dict[str, Tensor]:
        """The tensors of the file, by name."""
        return dict(self.state_dict())


class OwnWeights(WeightAdapter):
    """A copy of all parameters that a module itself holds, to be trained: fine-tuning."""

    kind = "own"

    def __init__(
        self, layer: nn.Module, tied: dict[nn.Parameter, nn.Parameter] | None = None
    ) -> None:
        """`tied` remembers the copies: one that layers of the backbone share stays shared."""
        super().__init__()
        tied = {} if tied is None else tied
        for name, p in layer.named_parameters(recurse=False):
            if p not in tied:
                tied[p] = nn.Parameter(p.detach().clone())
            self.register_parameter(name, tied[p])

    def parameters_for(self, layer: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        return dict(self.named_parameters())


class MaskWeights(WeightAdapter):
    """``W ∘ (scores > 5e-3)``: a binary mask on the frozen weight of a Conv2d or Linear layer.

    Trained through real scores of W's shape; the gradient passes the threshold straight through.
    `pack_` leaves 1 bit a weight, eight in a byte, which is unpacked where it is used and not
    kept; files hold that form alone.
    """

    kind = "mask"

    def __init__(self, layer: nn.Module, packed: bool = False) -> None:
        super().__init__()
        weight = layer.get_parameter("weight")
        self.shape = weight.shape
        self.scores: nn.Parameter | None
        self.packed: Tensor | None
        if packed:
            bits = torch.zeros(-(-weight.numel() // 8), dtype=torch.uint8, device=weight.device)
            self.register_parameter("scores", None)
            self.register_buffer("packed", bits)
        else:
            self.scores = nn.Parameter(torch.full_like(weight, MASK_START))
            self.register_buffer("packed", None)

    def mask(self) -> Tensor:
        """The binary mask, bool, of the weight's shape."""
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
        """Forget the scores, keep the mask."""
        if self.scores is not None:
            self.packed = pack(self.mask())
            self.scores = None

    def thaw_(self, layer: nn.Module) -> None:
        """Scores again, as far from the threshold as at their start: to train a packed mask on."""
        if self.scores is None:
            scores = self.mask().to(layer.get_parameter("weight")) * MASK_START
            self.scores, self.packed = nn.Parameter(scores), None

    def bits(self) -> int:
        """What the domain must ship for this layer: 1 bit a weight."""
        return self.shape.numel()

    def stored(self) -> dict[str, Tensor]:
        return {"packed": pack(self.mask()) if self.packed is None else self.packed}


def pack(mask: Tensor) -> Tensor:
    """Bools of any shape → uint8 (n / 8, rounded up), first in the lowest bit."""
    flat = mask.flatten().to(torch.uint8)
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).view(-1, 8)
    return (flat << _PLACES.to(flat.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The first n bools that were packed."""
    bits = packed[:, None].bitwise_right_shift(_PLACES.to(packed.device)) & 1
    return bits.flatten()[:n].bool()
