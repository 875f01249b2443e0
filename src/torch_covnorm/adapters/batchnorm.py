"""BatchNorm only (Bilen 2017): the residual adapter without its A."""

from __future__ import annotations

from torch import Tensor, nn

from .base import Adapter, base_forward


class BatchNormAdapter(Adapter):
    """``B2(F(x))``; where the backbone's own norm follows, that one (per domain) is B2."""

    kind = "batchnorm"

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.B2(base_forward(layer, x))
