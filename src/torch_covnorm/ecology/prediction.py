"""What a domain answers to images: probabilities, by the preprocessing that it was trained with."""

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
    """``{"size", "mean", "std", "fit"}`` of a domain."""
    return check_preprocessing(net.domain(name).preprocessing, name)


def check_preprocessing(how: Any, name: str) -> dict[str, Any]:
    """The same out of what a record says of it, or an error."""
    if not isinstance(how, dict) or not {"size", "mean", "std"} <= set(how):
        raise CovNormError(
            f"domain {name!r}: its preprocessing {how!r} does not say size, mean and std"
        )
    return {"fit": "squash", **how}


def read_inputs(net: MultiDomainNetwork, name: str, files: Sequence[Any]) -> Tensor:
    """Image files as a domain reads them: uint8 (n, 3, size, size)."""
    how = preprocessing(net, name)
    return torch.stack([load_image(f, how["size"], how["fit"]) for f in files])


@torch.no_grad()
def probabilities(net: MultiDomainNetwork, name: str, images: Tensor, batch: int = 64) -> Tensor:
    """Softmax of a domain's answers to uint8 images (n, 3, size, size): (n, classes)."""
    how, device = preprocessing(net, name), next(net.backbone.parameters()).device
    found = [
        net(as_input(part, how).to(device), domain=name).float().softmax(1).cpu()
        for part in images.split(batch)
    ]
    return torch.cat(found)
