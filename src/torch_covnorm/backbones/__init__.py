"""Load the backbone: by name, or from a file of weights."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CovNormError, CovNormWarning
from .efficientnet_lite import EfficientNetLite0
from .mobilenet_v2 import MobileNetV2
from .packages import PACKAGED, packaged
from .resnet26 import ResNet26
from .timm_models import load_timm, timm_preprocessing
from .vgg import VGG16
from .weights import Matched, Mismatch, built, read_weights

File = str | os.PathLike[str]
NAMES: dict[str, Any] = {
    "efficientnet-lite0": EfficientNetLite0,
    "mobilenet-v2": MobileNetV2,
    "vgg16": VGG16,
    "resnet26": ResNet26,
}
_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")


def load_backbone(name: File, weights: File | None = None) -> nn.Module:
    """Load a backbone in eval mode.

    Args:
        name: "efficientnet-lite0" or "mobilenet-v2" (their ImageNet weights are in packages),
            "vgg16", "resnet26", the name of a timm model or "hf-hub:user/model" (with timm's
            pretrained weights), or a file of weights of one of the first four: .safetensors or
            .pth, in torchvision's, timm's, Hugging Face's or their authors' key names.
        weights: a file of weights to use instead, or "random". Its tensors are matched by name,
            else by order and shape.
    """
    return load_matched(name, weights)[0]


def load_matched(name: File, weights: File | None = None) -> tuple[nn.Module, Matched | None]:
    """Load a backbone as `load_backbone` does; return also how the tensors of a file matched it."""
    name, weights = os.fspath(name), None if weights is None else os.fspath(weights)
    matched: Matched | None = None
    if name.endswith(_ENDINGS):
        if weights is not None:
            raise CovNormError(f"{name}: already a file of weights: leave out weights={weights!r}")
        net, matched = _from_file(Path(name), *NAMES)
    elif name not in NAMES:
        net, matched = load_timm(name, weights, [*NAMES])
    else:
        given = weights
        if weights is None and name in PACKAGED:
            weights = str(packaged(name))
        if weights is None:
            warnings.warn(
                f"{name} has random weights. Pass weights=FILE for pretrained ones, or "
                "weights='random' if you want this.",
                CovNormWarning,
                stacklevel=3,
            )
        if weights in (None, "random"):
            net = NAMES[name]()
        else:
            net, matched = _from_file(Path(str(weights)), name)
            matched = None if given is None else matched
    return net.eval(), matched


def preprocessing_of(backbone: nn.Module) -> dict[str, Any]:
    """Return ``{"size", "mean", "std"}``: the inputs the backbone was trained with, RGB in [0, 1].

    Our models and timm's know theirs. For others it is ImageNet's usual values.
    """
    preprocessing = getattr(backbone, "preprocessing", None)
    if not isinstance(preprocessing, dict) or not {"size", "mean", "std"} <= set(preprocessing):
        preprocessing = timm_preprocessing(backbone)
    mean, std = list(preprocessing["mean"]), list(preprocessing["std"])
    return {"size": int(preprocessing["size"]), "mean": mean, "std": std}


def _from_file(file: Path, *names: str) -> tuple[nn.Module, Matched]:
    """Load the weights of one of these networks; match by order and shape only as a last resort."""
    weights = read_weights(file)
    for name in names:
        try:
            build = NAMES[name].build(weights.tensors)
            return built(build, weights, name, by_order=len(names) == 1)
        except Mismatch:
            if len(names) == 1:
                raise
    raise CovNormError(
        f"{file}: not the weights of {' or '.join(names)}. Pass the backbone's name and "
        "weights=FILE to see what differs."
    )
