"""The four adapter kinds: structures of A, B1 and B2 around a layer F of the backbone."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from .maps import LinearMap
from .site import Site, base_forward, centre_tap


class Adapter(nn.Module):
    """``B2(r z + A(B1(u)))``, z = F(x), in the place of a layer's F(x); without A, ``B2(z)``.

    The class attributes of a kind say what r and u are: r = 1 if `residual`, and u = z or x.
    """

    kind: str
    residual: bool = True
    map_input: Literal["output", "input"] = "output"  # u = z, or u = x at F's center tap

    def __init__(self, A: LinearMap | None, B1: nn.Module, B2: nn.Module) -> None:
        super().__init__()
        self.A = A
        self.B1 = B1
        self.B2 = B2

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        z = base_forward(layer, x)
        if self.A is None:
            return self.B2(z)
        u = z if self.map_input == "output" else centre_tap(layer, x, z)
        y = self.A(self.B1(u))
        return self.B2(z + y if self.residual else y)

    @classmethod
    def input_channels(cls, site: Site) -> int:
        """Return the number of columns of A at a site."""
        return site.d_out if cls.map_input == "output" else site.d_in

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


class ParallelAdapter(Adapter):
    """``B2(F(x) + A(x))``: a 1×1 path beside the layer (Rebuffi 2018), with the layer's stride.

    At a Conv2d the input of A is x at the center tap of F's kernel. With the usual "same" padding
    this is x itself, strided. Therefore A folds into the center tap for any padding.
    """

    kind = "parallel"
    map_input = "input"


class ConvAdapter(Adapter):
    """``A F(x)``: new filters as linear combinations of the old (Rosenfeld, DAN).

    No residual and no norms, but a bias. A starts as the identity.
    """

    kind = "conv"
    residual = False


class BatchNormAdapter(Adapter):
    """``B2(F(x))``: norms only (Bilen 2017), eq. 9 with a learned scale and shift.

    Where a norm of the backbone follows the layer, the domain's copy of that norm is B2.
    """

    kind = "batchnorm"


KINDS = {a.kind: a for a in (ResidualAdapter, ParallelAdapter, ConvAdapter, BatchNormAdapter)}
