"""1×1 adapter (Rosenfeld, DAN): new filters as linear combinations of the old."""

from __future__ import annotations

from torch import Tensor, nn

from .base import Adapter, base_forward
from .maps import LinearMap


class ConvAdapter(Adapter):
    """``A F(x)``: no residual, no norms, its own bias; A starts as the identity."""

    kind = "conv"
    A: LinearMap
    residual = False

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.A(base_forward(layer, x))
