"""A mapping of modules that accepts any name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


class ModuleMap(nn.Module):
    """Modules by name. Unlike nn.ModuleDict it accepts dots and names such as ``train``."""

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self._keys: dict[str, str] = {}
        for name, module in (modules or {}).items():
            self[name] = module

    def __getitem__(self, name: str) -> Any:
        return self._modules[self._keys[name]]

    def __setitem__(self, name: str, module: nn.Module) -> None:
        key = name.replace(".", "/")  # nn.Module uses the dot as separator
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
        """Return the names in insertion order."""
        return list(self)

    def values(self) -> list[Any]:
        """Return the modules in insertion order."""
        return [self[name] for name in self]

    def items(self) -> list[tuple[str, Any]]:
        """Return the pairs of name and module in insertion order."""
        return [(name, self[name]) for name in self]
