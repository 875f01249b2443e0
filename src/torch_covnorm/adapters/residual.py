"""Series residual adapter (Rebuffi 2017), the structure that the paper adopts."""

from __future__ import annotations

from torch import Tensor, nn

from .base import Adapter, base_forward
from .maps import LinearMap


class ResidualAdapter(Adapter):
    """``T = B2(I + A B1)`` behind F: ``B2(z + A(B1(z)))`` with z = F(x)."""

    kind = "residual"
    A: LinearMap

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        z = base_forward(layer, x)
        return self.B2(z + self.A(self.B1(z)))
