"""Keep the state of a training stage in a folder, so that a killed process can resume.

Tensors go to safetensors and everything else to JSON. A save is complete or has no effect, and
nothing is pickled.
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

FORMAT = "torch-covnorm snapshot"
RECORD = "snapshot.json"
Folder = str | os.PathLike[str]


class SnapshotMismatch(CovNormError):
    """A snapshot was made with other settings: `key` was `was` and is `now`."""

    def __init__(self, message: str, key: str = "", was: Any = None, now: Any = None) -> None:
        super().__init__(message)  # the only required argument, so that the error can be pickled
        self.key, self.was, self.now = key, was, now


class Snapshot:
    """The newest state of one stage.

    `settings` identify the stage: loading a snapshot made with other settings raises
    `SnapshotMismatch`. `due` says whether `every` seconds have passed since the last save.
    """

    def __init__(self, folder: Folder, settings: dict[str, Any], every: float = 20.0) -> None:
        self.file, self.settings, self.every = Path(folder) / RECORD, settings, every
        self.last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the saved state, or None if there is none yet."""
        if not self.file.exists():
            return None
        record = records.read(self.file, FORMAT)
        with records.blame(self.file):
            saved: dict[str, Any] = dict(record["settings"])
        for key in sorted({*saved, *self.settings}):
            was, now = saved.get(key), self.settings.get(key)
            if was != now:
                message = (
                    f"{self.file}: was made with {key}={was!r}, but now it is {now!r}. Use another "
                    "folder, or remove this one to start over."
                )
                raise SnapshotMismatch(message, key, was, now)
        with records.blame(self.file):
            state = _decode(record["state"], records.read_tensors(self.file, record))
        return dict(state)

    def due(self) -> bool:
        """Return whether it is time to save again."""
        return time.monotonic() - self.last >= self.every

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state: nested dicts, lists and tuples of tensors and plain values."""
        tensors: dict[str, Tensor] = {}
        encoded = _encode(state, tensors, "")
        records.write(self.file, FORMAT, {"settings": self.settings, "state": encoded}, tensors)
        self.last = time.monotonic()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, including those that `state_dict` omits."""
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


@torch.no_grad()
def restore_(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy the tensors of `tensors_of` back into the module, bit for bit."""
    check_fits(module, saved)
    current = tensors_of(module)
    for name, tensor in saved.items():
        current[name].copy_(tensor)


def check_fits(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Check that saved tensors have the names, shapes and dtypes of the module's."""
    ours, theirs = (
        {n: (t.shape, t.dtype) for n, t in tensors.items()}
        for tensors in (tensors_of(module), saved)
    )
    differ = sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n))
    if differ:
        raise CovNormError(
            f"the snapshot belongs to another domain (different: {', '.join(differ[:4])}). "
            "Use another folder."
        )


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        key = f"{len(tensors):06}"
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {"dict": [[k, _encode(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CovNormError(
        f"{path}: a snapshot cannot hold a {type(value).__name__}. Use tensors and plain values."
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((type_, content),) = value.items()
    if type_ == "tensor":
        return tensors[content]
    if type_ == "float":
        return float(content)
    if type_ == "dict":
        return {k: _decode(v, tensors) for k, v in content}
    items = [_decode(v, tensors) for v in content]
    return tuple(items) if type_ == "tuple" else items
