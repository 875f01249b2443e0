"""Modules by any name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


class ModuleMap(nn.Module):
    """Modules by any name: with dots (``features.0``), or one nn.ModuleDict refuses (``train``)."""

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self._keys: dict[str, str] = {}
        for name, module in (modules or {}).items():
            self[name] = module

    def __getitem__(self, name: str) -> Any:
        return self._modules[self._keys[name]]

    def __setitem__(self, name: str, module: nn.Module) -> None:
        key = name.replace(".", "/")  # nn.Module's own separator
        self._modules[key] = module
        self._keys[name] = key

    def __delitem__(self, name: str) -> None:
        del self._modules[self._keys.pop(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self) -> list[str]:
        """The names, in the order in which they came."""
        return list(self)

    def items(self) -> list[tuple[str, Any]]:
        """Names and modules."""
        return [(name, self[name]) for name in self]
