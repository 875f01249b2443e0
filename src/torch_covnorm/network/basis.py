"""What the domains of joint mode share: one C and W per site, and the moments behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from .. import records
from ..adapters import SharedFactors
from ..stats.moments import Moments
from ..stats.pooling import Felt
from .modulemap import ModuleMap

Decomposition = Literal["covnorm", "svd"]


class Basis(nn.Module):
    """W, C and mu_x at every site, shared by all domains of the basis; see ``net.bases``.

    `x` and `y` hold the global (N, mu, Sigma) of eq. 10 by site: all that a further domain needs
    to join, in constant space. With the metric of the loss, `felt` is needed too. Joint SVD keeps
    none of them.
    """

    def __init__(
        self,
        name: str,
        decomposition: Decomposition,
        factors: Mapping[str, SharedFactors],
        x: dict[str, Moments] | None = None,
        y: dict[str, Moments] | None = None,
        settings: dict[str, Any] | None = None,
        felt: dict[str, Felt] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.decomposition = decomposition
        self.factors = ModuleMap(factors)
        self.x = x or {}
        self.y = y or {}
        self.settings = settings or {}
        self.felt = felt or {}

    def extra_repr(self) -> str:
        """Return what `print` shows of it."""
        return f"{self.name!r}, {self.decomposition}, {self.num_parameters():,} shared"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the current factors."""
        return records.digest({k: v.float() for k, v in self.factors.state_dict().items()})

    @property
    def seen(self) -> int:
        """N of eq. 10: rows of features from all domains; 0 if no moments are kept."""
        return max((int(m.n) for m in self.x.values()), default=0)

    def num_parameters(self) -> int:
        """Return the number of entries of all W and C."""
        return sum(f.numbers() for f in self.factors.values())

    @property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """{site: (kx, ky)}."""
        return {site: f.ranks for site, f in self.factors.items()}
