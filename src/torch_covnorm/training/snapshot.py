"""Where a stage of training stands, in a folder: what kill −9 must not cost.

Tensors go to safetensors and all else to JSON, whole or not at all; nothing is pickled.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import records
from ..errors import CovNormError
from ..stats.moments import Moments

FORMAT = "torch-covnorm snapshot"
RECORD = "snapshot.json"


class Snapshot:
    """The newest state of one stage: `load` it, and `save` it every few seconds.

    `settings` identify the stage: a snapshot of other settings is refused, not mixed in.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: dict[str, Any], every: float = 20.0
    ) -> None:
        self.file = Path(folder) / RECORD
        self.settings = settings
        self.every = every
        self.last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state as `save` was given it; None: nothing was saved yet."""
        if not self.file.exists():
            return None
        record = records.read(self.file, FORMAT)
        with records.blame(self.file):
            for key in sorted({*record["settings"], *self.settings}):
                was, now = record["settings"].get(key), self.settings.get(key)
                if was != now:
                    raise CovNormError(
                        f"was made with {key}={was!r}, now it is {now!r}: give another folder, or "
                        "remove this one to begin anew"
                    )
            tensors = records.read_tensors(self.file, record)
            state: dict[str, Any] = _decode(record["state"], tensors)
        return state

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self.last >= self.every

    def save(self, state: dict[str, Any]) -> None:
        """Replace what was saved: nested dicts, lists and tuples of tensors and plain values."""
        tensors: dict[str, Tensor] = {}
        encoded = _encode(state, tensors, "")
        records.write(self.file, FORMAT, {"settings": self.settings, "state": encoded}, tensors)
        self.last = time.monotonic()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a module by name; unlike `state_dict`, truly every one."""
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


@torch.no_grad()
def restore_(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Put the tensors of `tensors_of` back, bit for bit."""
    check_fits(module, saved)
    own = tensors_of(module)
    for name, tensor in saved.items():
        own[name].copy_(tensor)


def check_fits(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Refuse tensors of another module."""
    shapes = [{n: (t.shape, t.dtype) for n, t in s.items()} for s in (tensors_of(module), saved)]
    if shapes[0] != shapes[1]:
        differ = sorted(
            n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n)
        )
        raise CovNormError(f"the snapshot is of another domain ({', '.join(differ[:4])} …)")


def save_moments(
    folder: str | os.PathLike[str], settings: dict[str, Any], moments: dict[str, Moments]
) -> None:
    """Keep {site: moments}, a finished stage."""
    Snapshot(folder, settings).save({site: m.state_dict() for site, m in moments.items()})


def load_moments(
    folder: str | os.PathLike[str], settings: dict[str, Any]
) -> dict[str, Moments] | None:
    """The moments that were kept; None: none were."""
    state = Snapshot(folder, settings).load()
    if state is None:
        return None
    moments = {site: Moments(len(m["mean"])) for site, m in state.items()}
    for site, m in moments.items():
        m.load_state_dict(state[site])
    return moments


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        key = f"{len(tensors):06}"
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        pairs = [[k, _encode(v, tensors, f"{path}/{k}")] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CovNormError(f"{path}: {type(value).__name__} cannot be kept in a snapshot")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {k: _decode(v, tensors) for k, v in content}
    items = [_decode(v, tensors) for v in content]
    return tuple(items) if kind == "tuple" else items
