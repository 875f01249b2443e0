"""Joint mode at one site: factors that several domains share, and the maps that use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .maps import LinearMap


class SharedFactors(nn.Module):
    """W (kx, d_in), C (d_out, ky) and mu_x (d_in,) of a site, shared by all domains of a basis.

    C is None for joint SVD, which shares only the input side.
    """

    def __init__(self, W: Tensor, C: Tensor | None, mu_x: Tensor) -> None:
        super().__init__()
        self.W: Tensor
        self.C: Tensor | None
        self.mu_x: Tensor
        self.register_buffer("W", W.contiguous())  # as in files, for equal bits
        self.register_buffer("C", None if C is None else C.contiguous())
        self.register_buffer("mu_x", mu_x)

    @property
    def ranks(self) -> tuple[int, int]:
        """(kx, ky). Without C, ky is 0 here: only M knows d_out."""
        return len(self.W), 0 if self.C is None else self.C.shape[1]


class _Reference:
    """A module that its holder uses but does not own: not part of its state or its copies.

    If the holder and the module are copied together, the new holder refers to the new module.
    """

    def __init__(self, module: SharedFactors) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        return _Reference(memo.get(id(self.module), self.module))


class JointMap(LinearMap):
    """``C M_i (W (x - mu_x)) + b_i`` (eq. 8 in joint mode). It owns only M_i (ky, kx) and b_i.

    Without a shared C (joint SVD), M_i is (d_out, kx).
    """

    form = "joint"

    def __init__(self, spatial: bool, d_out: int, shared: SharedFactors) -> None:
        super().__init__(spatial, d_out)
        self.share(shared)
        kx, ky = shared.ranks
        self.M: Tensor
        self._make_M(torch.eye(ky or d_out, kx))

    def _make_M(self, M: Tensor) -> None:
        self.M = nn.Parameter(M)

    @property
    def shared(self) -> SharedFactors:
        """The factors shared with the other domains of the basis."""
        return self._reference.module

    def share(self, shared: SharedFactors) -> None:
        """Use these factors from now on. The caller must set a matching M."""
        self._reference = _Reference(shared)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        W, C = self.shared.W, self.shared.C
        return (W, self.M) if C is None else (W, self.M, C)

    @property
    def centre(self) -> Tensor:
        return self.shared.mu_x


class SharedMap(JointMap):
    """A `JointMap` with a truncated identity as M: a domain has no matrix to store or tune.

    The authors sketch this in a comment in the paper's source.
    """

    form = "shared"

    def _make_M(self, M: Tensor) -> None:
        self.register_buffer("M", M, persistent=False)


SHARED_FORMS = {m.form: m for m in (JointMap, SharedMap)}
