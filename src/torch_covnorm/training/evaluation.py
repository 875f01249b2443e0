"""Measure a domain: loss and accuracy over labeled images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from .batches import as_loader, labels_of

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over n images.

    `accuracy` is in percent, and None if the labels are not class numbers. So is `confidence`, the
    mean probability of the true class: it varies less by chance than the accuracy does.
    """

    loss: float
    accuracy: float | None
    n: int
    confidence: float | None = None

    @property
    def standard_error(self) -> float:
        """The binomial standard error of the accuracy, in points."""
        share = (self.accuracy or 0.0) / 100
        return 100 * math.sqrt(share * (1 - share) / self.n)


@torch.no_grad()
def correct(net: MultiDomainNetwork, name: str, loader: Iterable[Any]) -> Tensor:
    """Return whether a domain is right about each image of a loader, booleans (n,)."""
    domain, device = net.domain(name), next(net.backbone.parameters()).device
    with eval_mode(net.backbone, domain):
        right = [
            net(images.to(device), domain=name).argmax(1).cpu() == torch.as_tensor(labels)
            for images, labels in as_loader(loader, domain.preprocessing)
        ]
    return torch.cat(right)


@torch.no_grad()
def evaluate(
    net: MultiDomainNetwork,
    name: str,
    loader: Iterable[Any],
    criterion: Criterion = F.cross_entropy,
) -> Evaluation:
    """Measure a domain on (images, labels) in eval mode, then restore the network's mode."""
    domain, device = net.domain(name), next(net.backbone.parameters()).device
    loss, confidence, correct, n, classes = 0.0, 0.0, 0, 0, True
    with eval_mode(net.backbone, domain):
        for images, labels in as_loader(loader, domain.preprocessing):
            images, labels = images.to(device), labels_of(labels, domain).to(device)
            out = net(images, domain=name)
            loss += criterion(out, labels).item() * len(images)
            n += len(images)
            classes = classes and not labels.is_floating_point() and out.ndim == labels.ndim + 1
            if classes:
                correct += int((out.argmax(1) == labels).sum())
                confidence += float(out.softmax(1).gather(1, labels[:, None]).sum())
    if n == 0:
        raise CovNormError(
            f"domain {name!r}: the loader yielded no images to evaluate. Check the data."
        )
    if not classes:
        return Evaluation(loss / n, None, n)
    return Evaluation(loss / n, 100 * correct / n, n, 100 * confidence / n)
