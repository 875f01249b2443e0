"""scikit-learn's digits at 8 px and a network that learns them in a second."""

from __future__ import annotations

import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torch_covnorm as cn

Batches = list[tuple[Tensor, Tensor]]


def backbone(dropout: float = 0.0, widths: tuple[int, int] = (6, 8)) -> nn.Module:
    torch.manual_seed(0)
    first, second = widths
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(second, 5),
    )


def network(
    dropout: float = 0.0, adapter: str = "residual", norms: str = "own"
) -> cn.MultiDomainNetwork:
    """A network with a domain to train, "digits", and one that must not change, "other"."""
    net = cn.MultiDomainNetwork(backbone(dropout))
    torch.manual_seed(1)
    net.add_domain("digits", classes=10, adapter=adapter, norms=norms)
    net.add_domain("other", classes=3, norms=norms)
    return net


def digits(n: int = 60, start: int = 0) -> tuple[Tensor, Tensor]:
    data = load_digits()
    x = torch.tensor(data.images[start : start + n], dtype=torch.float32)[:, None] / 8 - 1
    return x, torch.tensor(data.target[start : start + n])


def batches(n: int = 60, size: int = 20, start: int = 0) -> Batches:
    x, y = digits(n, start)
    return list(zip(x.split(size), y.split(size), strict=True))


def trained() -> tuple[cn.MultiDomainNetwork, Batches]:
    """A network with a domain "ra" whose residual adapters are trained, and its data."""
    net, data = cn.MultiDomainNetwork(backbone()), batches(200, 20)
    given = {"epochs": 6, "lr": 0.02, "norms": "own"}
    cn.adapt(net, "ra", data, data[:3], "ra", training="default", classes=10, **given)
    return net, data


def regression(n: int = 60, size: int = 20) -> tuple[cn.MultiDomainNetwork, Batches]:
    """A network with a domain "ink", and images labelled with their darkness."""
    net = cn.MultiDomainNetwork(backbone())
    net.add_domain("ink", classes=1, norms="own")
    return net, [(x, x.mean((1, 2, 3))[:, None]) for x, _ in batches(n, size)]


def state(net: cn.MultiDomainNetwork, name: str = "digits") -> dict[str, Tensor]:
    return {k: v.clone() for k, v in net.domain(name).state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def noisy(x: Tensor) -> Tensor:
    """An augmentation that draws from every source of random numbers."""
    return x + 0.1 * (1 + random.random()) * (1 + np.random.rand()) * torch.randn_like(x)
