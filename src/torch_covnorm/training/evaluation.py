"""Measure a domain: loss and accuracy over labeled images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from .batches import labels_of

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over n images.

    `accuracy` is in percent, and None if the labels are not class numbers.
    """

    loss: float
    accuracy: float | None
    n: int


@torch.no_grad()
def evaluate(
    net: MultiDomainNetwork,
    name: str,
    loader: Iterable[Any],
    criterion: Criterion = F.cross_entropy,
) -> Evaluation:
    """Measure a domain on (images, labels) in eval mode, then restore the network's mode."""
    domain, device = net.domain(name), next(net.backbone.parameters()).device
    loss, correct, n, classes = 0.0, 0, 0, True
    with eval_mode(net.backbone, domain):
        for images, labels in loader:
            images, labels = images.to(device), labels_of(labels, domain).to(device)
            out = net(images, domain=name)
            loss += criterion(out, labels).item() * len(images)
            n += len(images)
            classes = classes and not labels.is_floating_point() and out.ndim == labels.ndim + 1
            if classes:
                correct += int((out.argmax(1) == labels).sum())
    if n == 0:
        raise CovNormError(
            f"domain {name!r}: the loader yielded no images to evaluate. Check the data."
        )
    return Evaluation(loss / n, 100 * correct / n if classes else None, n)
