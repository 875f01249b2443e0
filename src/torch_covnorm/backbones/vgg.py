"""VGG16 (Simonyan & Zisserman), the paper's network, with torchvision's key names."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from .weights import Build

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: pool
FC6 = 4096 * 512 * 7 * 7  # its weights; no other layer has as many


class VGG16(nn.Module):
    """13 convolutions, then fc6, fc7 and the head; or, with ``fc=False``, only a pooled head.

    (n, 3, h, w) → (n, classes). Without the fc layers, images may have any size from 32 px.
    """

    # What torchvision's ImageNet weights expect, for RGB in [0, 1].
    preprocessing: ClassVar = {
        "size": 224,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }

    def __init__(self, fc: bool = True, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        d = 3
        for channels in CHANNELS:
            if channels == 0:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(d, channels, 3, padding=1), nn.ReLU(inplace=True)]
                d = channels
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7 if fc else 1)
        if fc:
            self.classifier: nn.Module = nn.Sequential(
                nn.Linear(512 * 7 * 7, 4096),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(4096, 4096),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(4096, num_classes),
            )
        else:
            self.classifier = nn.Linear(512, num_classes)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.constant_(layer.get_parameter("bias"), 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))

    @classmethod
    def build(cls, state: dict[str, Tensor]) -> Build:
        """Return what makes the VGG16 of a state dict, with the fc layers if it has them."""
        fc = any(tensor.numel() == FC6 for tensor in state.values())
        if not fc:
            return Build(partial(cls, False), "classifier", ({"head.fc": "classifier"},))
        return Build(partial(cls, True), "classifier.6", (_TIMM,))


# timm's fc layers are convolutions.
_TIMM = {"pre_logits.fc1": "classifier.0", "pre_logits.fc2": "classifier.3"}
_TIMM |= {"head.fc": "classifier.6"}
