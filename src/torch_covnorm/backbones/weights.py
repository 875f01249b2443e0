"""Read files of weights, and load them into a backbone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from ..errors import CovNormError

Net = TypeVar("Net", bound=nn.Module)


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Read tensors by name from a .safetensors or torch file, without unpickling any code."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise many types; all of them mean this file
        raise CovNormError(f"{file}: cannot be read as weights ({error})") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise CovNormError(f"{file}: no state dict in it. Save tensors by name.")
    return {str(k).removeprefix("module."): v for k, v in state.items()}


def renamed(state: dict[str, Tensor], layers: dict[str, str]) -> dict[str, Tensor]:
    """Rename the layers of a state dict that are keys of `layers`."""
    split = ((*key.rpartition(".")[::2], tensor) for key, tensor in state.items())
    return {f"{layers.get(layer, layer)}.{end}": tensor for layer, end, tensor in split}


def loaded(make: Callable[[int], Net], state: dict[str, Tensor], head: str) -> Net | None:
    """Make a network for the classes of a state dict, and load it. The state may lack the head.

    Return None if it is that of another network.
    """
    net = make(len(state.get(f"{head}.weight", range(1000))))
    current = net.state_dict()
    if any(k in current and v.shape != current[k].shape for k, v in state.items()):
        return None
    missing, unexpected = net.load_state_dict(state, strict=False)
    optional = set() if f"{head}.weight" in state else {f"{head}.weight", f"{head}.bias"}
    return net if not unexpected and set(missing) <= optional else None
