"""What sits at one site for one domain: a structure of A, B1 and B2 around a frozen layer F."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from .maps import LinearMap


def base_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """F(x): the forward of the layer's class, past the routing that called the adapter."""
    return type(layer).forward(layer, x)


class Adapter(nn.Module):
    """Base of the structures. ``forward(layer, x)`` takes the place of the frozen layer's F(x).

    The class attributes say the same for eval mode, where all norms are affine (see `fold`):
    the output is ``B2(r z + A B1 u)`` with z = F(x), r = 1 for `residual`, and u the map's input.
    """

    kind: str
    residual: bool = True
    map_input: Literal["output", "input"] = "output"  # u = z, or u = x under F's centre tap

    def __init__(self, A: LinearMap | None, B1: nn.Module, B2: nn.Module) -> None:
        super().__init__()
        self.A = A
        self.B1 = B1
        self.B2 = B2

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Nothing to do here: no matrix, and the norm behind the site is the backbone's."""
        return self.A is None and isinstance(self.B2, nn.Identity)

    @property
    def trains(self) -> list[str]:
        """Names of the parameters that train: of A as its map says, and all of B1 and B2."""
        return [name for name, p in self.named_parameters() if p.requires_grad]

    def paper_count(self) -> int:
        """Adapter parameters as the paper counts them: the matrices alone."""
        return self.A.paper_count() if self.A is not None else 0

    def config(self) -> dict[str, Any]:
        """All that is needed, beside the site and the tensors, to build this adapter again."""
        A = self.A
        form = A and {"form": A.form, "ranks": A.ranks, "trains": A.trains}
        return {"kind": self.kind, "map": form, "B2": not isinstance(self.B2, nn.Identity)}
