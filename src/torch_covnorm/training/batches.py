"""What a loader yields: images, and labels that a domain's head can answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import CovNormError
from ..network.domain import Domain


def images_of(batch: Any) -> Tensor:
    """The images of what a loader yields: (images, labels), or images."""
    images: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
    return images


def labels_of(labels: Any, domain: Domain) -> Tensor:
    """Labels as a tensor, class numbers as int64; one that the head cannot answer is refused."""
    labels = torch.as_tensor(labels)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return labels
    classes = domain.width
    if labels.numel() and classes is not None and not domain.runs_own:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise CovNormError(
                f"domain {domain.name!r}: label {low if low < 0 else high}, but its head has "
                f"{classes} classes: give classes= when it is added"
            )
    return labels.long()
