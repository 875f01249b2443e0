"""The ResNet-26 of the Visual Decathlon (Rebuffi 2017)."""

from __future__ import annotations

import itertools
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CovNormError
from .weights import Build


class Block(nn.Module):
    """Two 3×3 convolutions. The shortcut halves the image and appends channels of zeros."""

    def __init__(self, d_in: int, d: int) -> None:
        super().__init__()
        self.halves = d_in != d
        self.conv1 = nn.Conv2d(d_in, d, 3, 2 if self.halves else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(d)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(d, d, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.halves:
            x = F.avg_pool2d(x, 2)
            x = torch.cat([x, torch.zeros_like(x)], 1)
        return F.relu(y + x)


class ResNet26(nn.Module):
    """Stem 3 → 32, three stages of four blocks at 64, 128 and 256, BN + ReLU, pool, head.

    (n, 3, h, w) → (n, classes); 64 px in the Decathlon.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(d // 2, d), *(Block(d, d) for _ in range(3)))
            for d in (64, 128, 256)
        )
        self.end_bn = nn.BatchNorm2d(256)
        self.fc = nn.Linear(256, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.relu(self.end_bn(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))

    @classmethod
    def build(cls, state: dict[str, Tensor]) -> Build:
        """Return what makes the network of a state dict; refuse one with adapters inside."""
        if any(".parallel_conv." in k or re.search(r"\.bns\.\d+\.0\.conv\.", k) for k in state):
            raise CovNormError(
                "this ResNet-26 was trained with adapters inside. Use one of the mode 'normal'."
            )
        return Build(cls, "fc", (_PUBLISHED,))


# Layer names of the residual-adapter authors, for their first task, and ours.
_PUBLISHED = {"pre_layers_conv.conv": "conv1", "pre_layers_conv.bns.0": "bn1"}
_PUBLISHED |= {"end_bns.0.0": "end_bn", "linears.0": "fc"}
_BLOCK = {"conv1.conv": "conv1", "conv1.bns.0": "bn1", "conv2.1.conv": "conv2"}
_BLOCK |= {"conv2.1.bns.0": "bn2"}
_PUBLISHED |= {
    f"layer{stage}.{place}.{old}": f"layer{stage}.{place}.{new}"
    for stage, place in itertools.product((1, 2, 3), range(4))
    for old, new in _BLOCK.items()
}
