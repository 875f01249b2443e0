"""A domain made ready for many batches: what its eval mode is, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .adapters import Folded, collapsed, forms, scale_shifts, stacked
from .sites import Site

if TYPE_CHECKING:
    from .domain import Domain


class Prepared(NamedTuple):
    """Scale and shift of all norms in one row (D,), and the form of every site's adapter.

    alone: the form as it is run where a batch is of this domain; parts: to be stacked with others.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    scale: Tensor
    shift: Tensor
    alone: dict[str, Folded]
    parts: dict[str, Folded]


@torch.no_grad()
def prepare(domain: Domain, sites: Mapping[str, Site], like: Tensor) -> Prepared:
    """Compute it. What is changed in the domain afterwards is not seen."""
    found = scale_shifts([dict(domain.norms.items())], like)
    pairs = list(found.values())
    none = like.new_zeros(0)
    scale = torch.cat([none, *(scale[0] for scale, _ in pairs)])
    shift = torch.cat([none, *(shift[0] for _, shift in pairs)])
    parts = {
        name: forms([domain.adapters[name]], site.d_in, site.d_out, like)
        for name, site in sites.items()
        if not domain.adapters[name].idle
    }
    alone = {name: collapsed(part) for name, part in parts.items()}
    sizes = tuple(scale.shape[1] for scale, _ in pairs)
    return Prepared(tuple(found), sizes, scale, shift, alone, parts)


def norms_of(prepared: Sequence[Prepared]) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: scale and shift (G, d)} of several domains, as `scale_shifts` gives them."""
    first = prepared[0]
    scale = torch.stack([p.scale for p in prepared])
    shift = torch.stack([p.shift for p in prepared])
    pieces = zip(scale.split(first.sizes, 1), shift.split(first.sizes, 1), strict=True)
    return dict(zip(first.names, pieces, strict=True))


def site_of(prepared: Sequence[Prepared], site: str, like: Tensor) -> Folded | None:
    """The stacked forms of a site; None: one of them has none, so they must be made anew."""
    if len(prepared) == 1:
        return prepared[0].alone.get(site)
    parts = [p.parts.get(site) for p in prepared]
    known = [p for p in parts if p is not None]
    return stacked(known, like) if len(known) == len(parts) else None
