"""A domain made ready for many batches: what its eval mode is, computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..adapters import Adapter, Folded, forms, scale_shifts, stacked
from ..errors import CovNormError
from .modulemap import ModuleMap
from .sites import Site

if TYPE_CHECKING:
    from .domain import Domain


class Prepared(NamedTuple):
    """Scale and shift of all norms in one row (D,), and the form of every site's adapter.

    kept: adapters whose factors a basis shares. A form would be a copy of them, so theirs are
    computed at every call.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    scale: Tensor
    shift: Tensor
    forms: dict[str, Folded]
    kept: dict[str, Adapter]

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        own = [t for a in self.kept.values() for t in a.state_dict().values()]
        return [self.scale, self.shift, *(t for f in self.forms.values() for t in f.tensors), *own]

    def moved(self, fn: Callable[[Tensor], Tensor]) -> Prepared:
        """On another device, or of another dtype: `fn` of every tensor."""
        for adapter in self.kept.values():
            adapter._apply(fn)
        forms = {site: form.moved(fn) for site, form in self.forms.items()}
        return self._replace(scale=fn(self.scale), shift=fn(self.shift), forms=forms)

    def form(self, site: Site, like: Tensor) -> Folded | None:
        """Of a site's adapter; None: it changes nothing."""
        if site.name in self.kept:
            return forms([self.kept[site.name]], site.d_in, site.d_out, like)
        return self.forms.get(site.name)


@torch.no_grad()
def prepare(domain: Domain, sites: Mapping[str, Site], like: Tensor) -> Prepared:
    """Compute it. What is changed in the domain afterwards is not seen."""
    found = scale_shifts([dict(domain.norms.items())], like)
    pairs = list(found.values())
    none = like.new_zeros(0)
    scale = torch.cat([none, *(scale[0] for scale, _ in pairs)])
    shift = torch.cat([none, *(shift[0] for _, shift in pairs)])
    busy = {name: a for name, a in domain.adapters.items() if not a.idle}
    kept = {} if domain.basis is None else busy
    known = {
        name: forms([a], sites[name].d_in, sites[name].d_out, like)
        for name, a in busy.items()
        if name not in kept
    }
    sizes = tuple(scale.shape[1] for scale, _ in pairs)
    return Prepared(tuple(found), sizes, scale, shift, known, kept)


def norms_of(prepared: Sequence[Prepared]) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: scale and shift (G, d)} of several domains, as `scale_shifts` gives them."""
    first = prepared[0]
    scale = torch.stack([p.scale for p in prepared])
    shift = torch.stack([p.shift for p in prepared])
    pieces = zip(scale.split(first.sizes, 1), shift.split(first.sizes, 1), strict=True)
    return dict(zip(first.names, pieces, strict=True))


def site_of(prepared: Sequence[Prepared], site: Site, like: Tensor) -> Folded | None:
    """The stacked forms of a site; None: none of them changes anything there."""
    found = [p.form(site, like) for p in prepared]
    if not any(found):
        return None
    one, zero = like.new_ones(1, site.d_out), like.new_zeros(1, site.d_out)
    return stacked([f or Folded(one, zero, (), ()) for f in found], like)


class Gone(ModuleMap):
    """What is left of a map: asking for what was let go, or for all, is an error that says so."""

    def __init__(self, name: str, left: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__(left)
        self.name = name

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) if name in self else self._refuse()

    def _refuse(self) -> Any:
        raise CovNormError(
            f"domain {self.name!r} was prepared to answer alone (prepare_(…, only=True)): load it "
            "anew to train, save, merge or count it"
        )

    __iter__ = __len__ = _refuse


def let_go_(domain: Domain) -> None:
    """Keep of a prepared domain what answers need: the prepared forms, the head, its own weights
    and module, and norms without statistics, which cannot be prepared."""
    assert domain.prepared is not None
    done = set(domain.prepared.names)
    domain.adapters = Gone(domain.name)
    left = {n: norm for n, norm in domain.norms.items() if n not in done}
    domain.norms = Gone(domain.name, left)
