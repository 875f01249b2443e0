"""MobileNetV2 (Sandler et al. 2018), with torchvision's key names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from .weights import Build

# expansion, channels, repeats, stride of the first block
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
WIDTH = 1280


def _conv(d_in: int, d: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(d_in, d, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(d),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, linear projection, and a shortcut if the shapes match."""

    def __init__(self, d_in: int, d: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = d_in * expansion
        self.conv = nn.Sequential(
            *([_conv(d_in, wide)] if expansion > 1 else []),
            _conv(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, d, 1, bias=False),
            nn.BatchNorm2d(d),
        )
        self.shortcut = stride == 1 and d_in == d

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    """3,504,872 parameters with its 1000-class head: (n, 3, h, w) → (n, classes)."""

    # What torchvision's ImageNet weights expect, for RGB in [0, 1].
    preprocessing: ClassVar = {
        "size": 224,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2)]
        d = 32
        for expansion, channels, repeats, stride in STAGES:
            for step in (stride, *[1] * (repeats - 1)):
                layers.append(InvertedResidual(d, channels, expansion, step))
                d = channels
        self.features = nn.Sequential(*layers, _conv(d, WIDTH))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, num_classes))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))

    @classmethod
    def build(cls, state: dict[str, Tensor]) -> Build:  # noqa: ARG003
        """Return what makes the network of a state dict."""
        return Build(cls, "classifier.1", (TIMM, HUGGING_FACE))


def _block_names(number: int, convs: Sequence[str], norms: Sequence[str]) -> dict[str, str]:
    """Return {layer of a block elsewhere: ours}, for expansion, depthwise, projection."""
    places = ["0.0", "0.1", "1.0", "1.1", "2", "3"]
    names = [name for pair in zip(convs, norms, strict=True) for name in pair]
    if number == 1:  # it has no expansion
        places, names = ["0.0", "0.1", "1", "2"], names[2:]
    return {old: f"features.{number}.conv.{new}" for old, new in zip(names, places, strict=True)}


def _timm_names() -> dict[str, str]:
    names = {"conv_stem": "features.0.0", "bn1": "features.0.1", "conv_head": "features.18.0"}
    names |= {"bn2": "features.18.1", "classifier": "classifier.1"}
    places = [(s, i) for s, (_, _, repeats, _) in enumerate(STAGES) for i in range(repeats)]
    for number, (stage, i) in enumerate(places, 1):
        norms = ("bn1", "bn2", "bn3") if stage else ("", "bn1", "bn2")
        convs = ("conv_pw", "conv_dw", "conv_pwl" if stage else "conv_pw")
        block = _block_names(number, convs, norms)
        names |= {f"blocks.{stage}.{i}.{old}": new for old, new in block.items()}
    return names


def _hugging_face_names() -> dict[str, str]:
    """Return the names of Hugging Face, whose stem includes the first block."""
    layers = {"conv_stem.first_conv": "features.0", "conv_1x1": "features.18"}
    names = {"classifier": "classifier.1"}
    for old, new in layers.items():
        names |= {f"{old}.convolution": f"{new}.0", f"{old}.normalization": f"{new}.1"}
    parts = ("expand_1x1", "conv_3x3", "reduce_1x1")
    convs, norms = ([f"{p}.{kind}" for p in parts] for kind in ("convolution", "normalization"))
    for number in range(1, 18):
        place = f"layer.{number - 2}" if number > 1 else "conv_stem"
        block = _block_names(number, convs, norms)
        names |= {f"{place}.{old}": new for old, new in block.items()}
    return names


TIMM, HUGGING_FACE = _timm_names(), _hugging_face_names()
