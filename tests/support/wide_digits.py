"""Digits on a network wide enough that a matrix in int8 is smaller than in float16."""

from __future__ import annotations

import functools

import small_digits
import torch
from torch import nn

import torch_covnorm as cn

DRAWN = 240  # training images; as many after them are for validation


def backbone() -> nn.Module:
    return small_digits.backbone(widths=(24, 32))


@functools.cache
def data() -> tuple[small_digits.Batches, small_digits.Batches]:
    return small_digits.batches(DRAWN, 40), small_digits.batches(DRAWN, 120, start=DRAWN)


@functools.cache
def _trained() -> dict[str, torch.Tensor]:
    net = cn.MultiDomainNetwork(backbone())
    given = {"epochs": 8, "lr": 0.02, "norms": "own"}
    cn.adapt(net, "ra", *data(), "ra", training="default", classes=10, **given)
    return small_digits.state(net, "ra")


def network(*names: str) -> cn.MultiDomainNetwork:
    """A network with these domains, each with the same trained residual adapters."""
    net = cn.MultiDomainNetwork(backbone()).eval()
    for name in names or ("ra",):
        net.add_domain(name, classes=10, norms="own")
        net.domain(name).load_state_dict(_trained())
    return net


def widen_(domain: cn.Domain, factor: float = 1024.0) -> None:
    """Add outliers, but keep the function: scale one input of each A down and its column up."""
    with torch.no_grad():
        for _, adapter in domain.adapters.items():
            adapter.B1.weight[0] /= factor
            adapter.B1.bias[0] /= factor
            adapter.A.A[:, 0] *= factor
