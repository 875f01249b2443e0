"""What files and merging need of a network: the modules before `network` use this type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from ..adapters import Adapter, WeightAdapter
from .basis import Basis
from .domain import Domain
from .modulemap import ModuleMap
from .sites import Site


class Network(Protocol):
    """The part of `MultiDomainNetwork` that `files`, `basis_files` and `merge` use."""

    backbone: nn.Module
    head_name: str | None
    sites: dict[str, Site]
    bases: ModuleMap
    fingerprint: str

    def basis(self, name: str) -> Basis:
        """Return a basis by name."""

    def make_domain(
        self,
        name: str,
        adapters: dict[str, Adapter],
        classes: Sequence[str] | int | None,
        own: nn.Module | None,
        preprocessing: Any,
        weights: Mapping[str, WeightAdapter] | None = None,
    ) -> Domain:
        """Return a new domain that is not yet in the network."""
