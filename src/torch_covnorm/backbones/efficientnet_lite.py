"""EfficientNet-Lite0 (no squeeze-excite, ReLU6), with timm's key names."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .weights import Build

# expansion, kernel, stride, channels, repeats
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
_norm = partial(nn.BatchNorm2d, eps=1e-3)


class SameConv2d(nn.Conv2d):
    """TensorFlow's "same" padding: as much as the output size needs, an odd pixel at the end."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = (
            max((-(-size // stride) - 1) * stride + k - size, 0)
            for size, stride, k in zip(x.shape[2:], self.stride, self.kernel_size, strict=True)
        )
        if h % 2 or w % 2:
            x = F.pad(x, [0, w % 2, 0, h % 2])
        return F.conv2d(x, self.weight, self.bias, self.stride, (h // 2, w // 2), 1, self.groups)


class SeparableBlock(nn.Module):
    """The block of the first stage: depthwise convolution, projection."""

    def __init__(self, d_in: int, d: int, kernel: int) -> None:
        super().__init__()
        self.conv_dw = SameConv2d(d_in, d_in, kernel, groups=d_in, bias=False)
        self.bn1 = _norm(d_in)
        self.conv_pw = nn.Conv2d(d_in, d, 1, bias=False)
        self.bn2 = _norm(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv_pw(F.relu6(self.bn1(self.conv_dw(x)))))


class InvertedBlock(nn.Module):
    """Expansion, depthwise convolution, projection, and a shortcut if the shapes match."""

    def __init__(self, d_in: int, d: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = d_in * expansion
        self.conv_pw = nn.Conv2d(d_in, wide, 1, bias=False)
        self.bn1 = _norm(wide)
        self.conv_dw = SameConv2d(wide, wide, kernel, stride, groups=wide, bias=False)
        self.bn2 = _norm(wide)
        self.conv_pwl = nn.Conv2d(wide, d, 1, bias=False)
        self.bn3 = _norm(d)
        self.shortcut = stride == 1 and d_in == d

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.conv_pw(x)))
        y = F.relu6(self.bn2(self.conv_dw(y)))
        y = self.bn3(self.conv_pwl(y))
        return x + y if self.shortcut else y


class EfficientNetLite0(nn.Module):
    """4,652,008 parameters with its 1000-class head: (n, 3, h, w) → (n, classes)."""

    # What the published ImageNet weights expect, for RGB in [0, 1]: (byte - 127) / 128.
    preprocessing: ClassVar = {"size": 224, "mean": [127 / 255] * 3, "std": [128 / 255] * 3}

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv_stem = SameConv2d(3, 32, 3, 2, bias=False)
        self.bn1 = _norm(32)
        stages: list[nn.Module] = []
        d = 32
        for expansion, kernel, stride, channels, repeats in STAGES:
            blocks: list[nn.Module] = []
            for step in (stride, *[1] * (repeats - 1)):
                if expansion == 1:
                    blocks.append(SeparableBlock(d, channels, kernel))
                else:
                    blocks.append(InvertedBlock(d, channels, expansion, kernel, step))
                d = channels
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.conv_head = nn.Conv2d(d, 1280, 1, bias=False)
        self.bn2 = _norm(1280)
        self.classifier = nn.Linear(1280, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu6(self.bn1(self.conv_stem(x))))
        x = F.relu6(self.bn2(self.conv_head(x)))
        return self.classifier(x.mean((2, 3)))

    @classmethod
    def build(cls, state: dict[str, Tensor]) -> Build:  # noqa: ARG003
        """Return what makes the network of a state dict."""
        return Build(cls, "classifier", (_PUBLISHED,))


# Layer names of the package of weights, and ours.
_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_OTHERS = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
_OTHERS |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
_PUBLISHED = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
_PUBLISHED |= {"_fc": "classifier"} | {
    f"_blocks.{number}.{old}": f"blocks.{stage}.{place}.{new}"
    for number, (stage, place) in enumerate(
        (stage, place) for stage, (*_, repeats) in enumerate(STAGES) for place in range(repeats)
    )
    for old, new in (_OTHERS if number else _FIRST).items()
}
