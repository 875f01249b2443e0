"""Minimal TensorBoard and wandb, for docs that log to them where they are not installed."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

LOGGED: list[tuple[str, object]] = []  # (writer, what it was given), by the stand-ins


class _Context:
    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = (args, kwargs)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SummaryWriter(_Context):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        LOGGED.append(("tensorboard", (tag, float(scalar_value), int(global_step or 0))))


class Run(_Context):
    def log(self, data: dict[str, float]) -> None:
        LOGGED.append(("wandb", {str(k): float(v) for k, v in data.items()}))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Put stand-ins in the place of what is not installed; returns their names."""
    LOGGED.clear()
    missing = {name for name in ("tensorboard", "wandb") if not importlib.util.find_spec(name)}
    modules = {
        "tensorboard": ("torch.utils.tensorboard", {"SummaryWriter": SummaryWriter}),
        "wandb": ("wandb", {"init": Run}),
    }
    for name in missing:
        module, members = modules[name]
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        vars(sys.modules[module]).update(members)
    return missing
