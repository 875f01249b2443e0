"""Check what a loader yields: images, and labels that fit the domain's head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import CovNormError
from ..network.domain import Domain


def images_of(batch: Any) -> Tensor:
    """Return the images of a batch: (images, labels), or only images."""
    images: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
    return images


def labels_of(labels: Any, domain: Domain) -> Tensor:
    """Return labels as a tensor, class numbers as int64. The head must have every class."""
    labels = torch.as_tensor(labels)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return labels
    classes = domain.width
    if labels.numel() and classes is not None and not domain.runs_own:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise CovNormError(
                f"domain {domain.name!r}: label {low if low < 0 else high} is out of range, "
                f"because its head has {classes} classes. Set classes= when you add the domain."
            )
    return labels.long()
