"""What files and merging need of a network, so that they do not import `network` itself."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from .modulemap import ModuleMap
from .sites import Site


class Network(Protocol):
    """The attributes of `MultiDomainNetwork` that the modules before it use."""

    backbone: nn.Module
    head_name: str | None
    sites: dict[str, Site]
    bases: ModuleMap
    fingerprint: str
    training: bool
