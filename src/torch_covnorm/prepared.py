"""A domain made ready for many batches: what its eval mode is, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .adapters import Folded, forms, scale_shifts, stacked
from .sites import Site

if TYPE_CHECKING:
    from .domain import Domain


class Prepared(NamedTuple):
    """Scale and shift of all norms in one row (D,), and the form of every site's adapter."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    scale: Tensor
    shift: Tensor
    forms: dict[str, Folded]

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [self.scale, self.shift, *(t for f in self.forms.values() for t in f.tensors)]


@torch.no_grad()
def prepare(domain: Domain, sites: Mapping[str, Site], like: Tensor) -> Prepared:
    """Compute it. What is changed in the domain afterwards is not seen."""
    found = scale_shifts([dict(domain.norms.items())], like)
    pairs = list(found.values())
    none = like.new_zeros(0)
    scale = torch.cat([none, *(scale[0] for scale, _ in pairs)])
    shift = torch.cat([none, *(shift[0] for _, shift in pairs)])
    known = {
        name: forms([domain.adapters[name]], site.d_in, site.d_out, like)
        for name, site in sites.items()
        if not domain.adapters[name].idle
    }
    sizes = tuple(scale.shape[1] for scale, _ in pairs)
    return Prepared(tuple(found), sizes, scale, shift, known)


def norms_of(prepared: Sequence[Prepared]) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: scale and shift (G, d)} of several domains, as `scale_shifts` gives them."""
    first = prepared[0]
    scale = torch.stack([p.scale for p in prepared])
    shift = torch.stack([p.shift for p in prepared])
    pieces = zip(scale.split(first.sizes, 1), shift.split(first.sizes, 1), strict=True)
    return dict(zip(first.names, pieces, strict=True))


def site_of(prepared: Sequence[Prepared], site: str, like: Tensor) -> Folded | None:
    """The stacked forms of a site; None: one of them has none, so they must be made anew."""
    known = [p.forms[site] for p in prepared if site in p.forms]
    return stacked(known, like) if len(known) == len(prepared) else None
