"""Joint mode at one site: factors that several domains share, and the map that uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .maps import LinearMap


class SharedFactors(nn.Module):
    """W (kx, d_in), C (d_out, ky) and mu_x (d_in,) of a site, the same for all domains of a basis.

    C is None for joint SVD, where only the factor on the input's side is shared.
    """

    def __init__(self, W: Tensor, C: Tensor | None, mu_x: Tensor) -> None:
        super().__init__()
        self.W: Tensor
        self.C: Tensor | None
        self.mu_x: Tensor
        self.register_buffer("W", W.contiguous())  # as files hold them: the same bits out
        self.register_buffer("C", None if C is None else C.contiguous())
        self.register_buffer("mu_x", mu_x)

    @property
    def ranks(self) -> tuple[int, int]:
        """(kx, ky); without C, ky is d_out and known to M alone: 0 here."""
        return len(self.W), 0 if self.C is None else self.C.shape[1]

    def numbers(self) -> int:
        """How many numbers the matrices hold: what sharing saves, counted once."""
        return self.W.numel() + (0 if self.C is None else self.C.numel())


class _Elsewhere:
    """A module that belongs to another one: no part of the holder's state or copies.

    Where both are copied together, the copies stay together.
    """

    def __init__(self, module: SharedFactors) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Elsewhere:
        return _Elsewhere(memo.get(id(self.module), self.module))


class JointMap(LinearMap):
    """``C M_i (W (x - mu_x)) + b_i`` (eq. 8 in joint mode): only M_i (ky, kx) and b_i are its own.

    Without a shared C (joint SVD) M_i is (d_out, kx), the domain's own factor.
    """

    form = "joint"

    def __init__(self, spatial: bool, d_out: int, shared: SharedFactors) -> None:
        super().__init__(spatial, d_out)
        self._elsewhere = _Elsewhere(shared)
        kx, ky = shared.ranks
        self.M: Tensor
        self._make_M(torch.eye(ky or d_out, kx))

    def _make_M(self, M: Tensor) -> None:
        self.M = nn.Parameter(M)

    @property
    def shared(self) -> SharedFactors:
        """What it has in common with the other domains of its basis."""
        return self._elsewhere.module

    def share(self, shared: SharedFactors) -> None:
        """Use these from now on; M is the caller's to renew."""
        self._elsewhere = _Elsewhere(shared)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        W, C = self.shared.W, self.shared.C
        return (W, self.M) if C is None else (W, self.M, C)

    @property
    def centre(self) -> Tensor:
        return self.shared.mu_x

    def paper_count(self) -> int:
        return self.M.numel()


class SharedMap(JointMap):
    """The same without an M of the domain's own: a truncated identity, nothing to store or tune.

    The authors sketch it in a comment of the paper's source: no parameters for a further domain.
    """

    form = "shared"

    def _make_M(self, M: Tensor) -> None:
        self.register_buffer("M", M, persistent=False)

    def paper_count(self) -> int:
        return 0
