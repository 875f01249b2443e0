"""What a domain computes in eval mode, prepared once for many batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..adapters import Adapter, Folded, NormTable, Site, fold, stack
from ..errors import CovNormError
from .modulemap import ModuleMap


class Prepared(NamedTuple):
    """Scale and shift of all norms of a domain, and the folded adapter of every site.

    kept: adapters that share factors with a basis, by site. They are folded at every call, because
    a folded copy would hold the shared factors again.
    """

    norms: NormTable
    folded: dict[str, Folded]
    kept: dict[str, Adapter]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it holds."""
        kept = [t for a in self.kept.values() for t in a.state_dict().values()]
        folded = [t for f in self.folded.values() for t in f.tensors]
        return [self.norms.scale, self.norms.shift, *folded, *kept]

    def map(self, fn: Callable[[Tensor], Tensor]) -> Prepared:
        """Return the same with `fn` applied to every tensor, to change the device or dtype."""
        for adapter in self.kept.values():
            adapter._apply(fn)
        norms = self.norms._replace(scale=fn(self.norms.scale), shift=fn(self.norms.shift))
        return Prepared(norms, {site: f.map(fn) for site, f in self.folded.items()}, self.kept)


@torch.no_grad()
def prepare(
    adapters: Mapping[str, Adapter],
    norms: Mapping[str, Any],
    sites: Mapping[str, Site],
    like: Tensor,
    keep: bool,
) -> Prepared:
    """Prepare adapters by site and norms by name. Later changes to them have no effect.

    keep: the adapters share factors with a basis, see `Prepared.kept`.
    """
    active = {name: a for name, a in adapters.items() if not a.idle}
    table = NormTable.of([norms], like)
    if keep:
        return Prepared(table, {}, active)
    return Prepared(table, {n: fold([a], sites[n], like) for n, a in active.items()}, {})


def prepared_site(prepared: Sequence[Prepared], site: Site, like: Tensor) -> Folded | None:
    """Return the stacked adapters of a site, or None if none of them changes anything."""
    parts = [
        fold([p.kept[site.name]], site, like) if site.name in p.kept else p.folded.get(site.name)
        for p in prepared
    ]
    if not any(parts):
        return None
    one, zero = like.new_ones(1, site.d_out), like.new_zeros(1, site.d_out)
    return stack([part or Folded(one, zero, (), ()) for part in parts], like)


class DroppedModules(ModuleMap):
    """The rest of a map after `prepare_(…, only=True)`: using a dropped module is an error."""

    def __init__(self, domain: str, rest: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__(rest)
        self.domain = domain

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) if name in self else self._refuse()

    def _refuse(self) -> Any:
        raise CovNormError(
            f"domain {self.domain!r} was prepared for inference only (prepare_(…, only=True)). "
            "Reload it to train, save, merge or count it."
        )

    __iter__ = __len__ = _refuse
