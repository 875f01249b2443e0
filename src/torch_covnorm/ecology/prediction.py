"""Class probabilities of images, with the preprocessing that a domain was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.image_files import load_image
from ..data.loader import as_input
from ..errors import CovNormError
from ..network.network import MultiDomainNetwork


def preprocessing(net: MultiDomainNetwork, name: str) -> dict[str, Any]:
    """Return ``{"size", "mean", "std", "fit"}`` of a domain."""
    return check_preprocessing(net.domain(name).preprocessing, name)


def check_preprocessing(config: Any, name: str) -> dict[str, Any]:
    """Return the preprocessing of a stored domain, or raise an error if it is incomplete."""
    if not isinstance(config, dict) or not {"size", "mean", "std"} <= set(config):
        raise CovNormError(
            f"domain {name!r}: its preprocessing {config!r} lacks size, mean or std: pass all "
            "three as preprocessing= when you add the domain"
        )
    return {"fit": "squash", **config}


def read_inputs(net: MultiDomainNetwork, name: str, files: Sequence[Any]) -> Tensor:
    """Read image files at a domain's size: uint8 (n, 3, size, size)."""
    config = preprocessing(net, name)
    return torch.stack([load_image(file, config["size"], config["fit"]) for file in files])


@torch.no_grad()
def probabilities(net: MultiDomainNetwork, name: str, images: Tensor, batch: int = 64) -> Tensor:
    """Return the softmax of a domain's logits for uint8 images (n, 3, h, w): (n, classes)."""
    config, device = preprocessing(net, name), next(net.backbone.parameters()).device
    parts = [
        net(as_input(part, config).to(device), domain=name).float().softmax(1).cpu()
        for part in images.split(batch)
    ]
    return torch.cat(parts)
