"""Class probabilities of images, with the preprocessing that a domain was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.image_files import load_image
from ..data.images import RESIZE, InputShape, check_background
from ..data.loader import as_input
from ..errors import CovNormError
from ..network.network import MultiDomainNetwork

# What a record without these keys means: it was written before they existed.
ASSUMED = {"fit": "squash", "background": None, "resize": RESIZE}


def preprocessing(net: MultiDomainNetwork, name: str) -> dict[str, Any]:
    """Return ``{"size", "mean", "std", "fit", "background", "resize"}`` of a domain."""
    return check_preprocessing(net.domain(name).preprocessing, name)


def check_preprocessing(config: Any, name: str) -> dict[str, Any]:
    """Return the preprocessing of a stored domain, or raise an error if it is incomplete."""
    if not isinstance(config, dict) or not {"size", "mean", "std"} <= set(config):
        raise CovNormError(
            f"domain {name!r}: its preprocessing {config!r} lacks size, mean or std: pass all "
            "three as preprocessing= when you add the domain"
        )
    try:
        background = check_background(config.get("background"))
    except CovNormError as error:
        raise CovNormError(f"domain {name!r}: its preprocessing has {error}") from None
    return {**ASSUMED, **config, "background": background}


def input_shape(preprocessing: Mapping[str, Any]) -> InputShape:
    """Return how images become squares, from what `check_preprocessing` returns."""
    return InputShape(*(preprocessing[key] for key in InputShape._fields))


def read_inputs(net: MultiDomainNetwork, name: str, files: Sequence[Any]) -> Tensor:
    """Read image files at a domain's size: uint8 (n, 3, size, size)."""
    shape = input_shape(preprocessing(net, name))
    return torch.stack([load_image(file, *shape) for file in files])


@torch.no_grad()
def probabilities(net: MultiDomainNetwork, name: str, images: Tensor, batch: int = 64) -> Tensor:
    """Return the softmax of a domain's logits for uint8 images (n, 3, h, w): (n, classes)."""
    config, device = preprocessing(net, name), next(net.backbone.parameters()).device
    parts = [
        net(as_input(part, config).to(device), domain=name).float().softmax(1).cpu()
        for part in images.split(batch)
    ]
    return torch.cat(parts)
