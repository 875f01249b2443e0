"""The four adapter kinds: structures of A, B1 and B2 around a layer F of the backbone."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from .centre_tap import centre_tap
from .maps import LinearMap


def base_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Return F(x): call the forward of the layer's class, which bypasses routing."""
    return type(layer).forward(layer, x)


class Adapter(nn.Module):
    """Base class. ``forward(layer, x)`` replaces the layer's F(x).

    The class attributes describe the same function in eval mode, where all norms are affine
    (see `fold`): ``B2(r z + A B1 u)`` with z = F(x), r = 1 if `residual`, and u the input of A.
    """

    kind: str
    residual: bool = True
    map_input: Literal["output", "input"] = "output"  # u = z, or u = x at F's centre tap

    def __init__(self, A: LinearMap | None, B1: nn.Module, B2: nn.Module) -> None:
        super().__init__()
        self.A = A
        self.B1 = B1
        self.B2 = B2

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether the adapter changes nothing: no A, and no B2 of its own."""
        return self.A is None and isinstance(self.B2, nn.Identity)

    @property
    def trains(self) -> list[str]:
        """Names of the trainable parameters."""
        return [name for name, p in self.named_parameters() if p.requires_grad]

    def paper_count(self) -> int:
        """Return the number of parameters as the paper counts them: only the matrices."""
        return self.A.paper_count() if self.A is not None else 0

    def config(self) -> dict[str, Any]:
        """Return what `build` needs, with the site and the tensors, to rebuild this adapter."""
        A = self.A
        described = A and {"form": A.form, "ranks": A.ranks, "trains": A.trains}
        return {"kind": self.kind, "map": described, "B2": not isinstance(self.B2, nn.Identity)}


class ResidualAdapter(Adapter):
    """``B2(z + A(B1(z)))``, z = F(x): in series (Rebuffi 2017), the structure of the paper."""

    kind = "residual"
    A: LinearMap

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        z = base_forward(layer, x)
        return self.B2(z + self.A(self.B1(z)))


class ParallelAdapter(Adapter):
    """``B2(F(x) + A(x))``: a 1×1 path beside the layer (Rebuffi 2018), with the layer's stride.

    At a Conv2d the input of A is x at the centre tap of F's kernel. With the usual "same" padding
    this is x itself, strided. Therefore A folds into the centre tap for any padding.
    """

    kind = "parallel"
    A: LinearMap
    map_input = "input"

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        z = base_forward(layer, x)
        return self.B2(z + self.A(centre_tap(layer, x, z)))


class ConvAdapter(Adapter):
    """``A F(x)``: new filters as linear combinations of the old (Rosenfeld, DAN).

    No residual and no norms, but a bias. A starts as the identity.
    """

    kind = "conv"
    A: LinearMap
    residual = False

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.A(base_forward(layer, x))


class BatchNormAdapter(Adapter):
    """``B2(F(x))``: norms only (Bilen 2017).

    Where a norm of the backbone follows the layer, the domain's copy of that norm is B2.
    """

    kind = "batchnorm"

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.B2(base_forward(layer, x))


KINDS = {a.kind: a for a in (ResidualAdapter, ParallelAdapter, ConvAdapter, BatchNormAdapter)}
