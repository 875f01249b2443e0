"""Learning without forgetting (Li & Hoiem 2017): fine-tune all, and keep the old head's answers.

The shared weights change, so this is a fork of the network: the domain gets its own copy of every
weight, of the old head too, and the backbone itself stays as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapters import OwnWeights, double
from .covnorm import eval_mode
from .domain import Domain
from .errors import CovNormError
from .network import MultiDomainNetwork


def distillation(answers: Tensor, targets: Tensor, T: float = 2.0) -> Tensor:
    """``-sum softmax(targets / T) log softmax(answers / T)``: the mean over (n, classes)."""
    return F.cross_entropy(answers / T, (targets / T).softmax(1))


def fork_(net: MultiDomainNetwork, name: str) -> Domain:
    """Give a domain of adapter="own" a copy of the backbone's own head too: the old task's."""
    domain = net.domain(name)
    if net.head_name is None:
        raise CovNormError(
            "lwf keeps the answers of the backbone's own head, and this one has none"
        )
    domain.weights[net.head_name] = OwnWeights(_head(net))
    return domain


class OldAnswers:
    """The fork's answers on the old task, from the features of the newest forward pass."""

    def __init__(self, net: MultiDomainNetwork, name: str) -> None:
        self.net, self.domain = net, net.domain(name)
        self.features: Tensor | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[OldAnswers]:
        """Inside, forward passes of the domain are seen."""

        def see(_: nn.Module, args: tuple[Tensor]) -> None:
            self.features = args[0]

        assert self.domain.head is not None
        hook = self.domain.head.register_forward_pre_hook(see)
        try:
            yield self
        finally:
            hook.remove()
            self.features = None

    def now(self) -> Tensor:
        """(n, old classes): the old head, as the fork has it, on the features seen last."""
        assert self.features is not None
        head = _head(self.net)
        own = self.domain.weights[str(self.net.head_name)].parameters_for(head)
        return double(head, own)(self.features)

    @torch.no_grad()
    def before(self, images: Tensor) -> Tensor:
        """(n, old classes): the answers of the unchanged backbone, the targets."""
        with eval_mode(self.net.backbone):
            targets: Tensor = self.net.backbone(images)
        return targets


@torch.no_grad()
def forgetting(
    net: MultiDomainNetwork,
    name: str,
    loader: Iterable[Any],
    source: Iterable[Any] | None = None,
) -> dict[str, float]:
    """What a fork has forgotten, in percent and points.

    `agreement`: on how many of the loader's images the fork's old head answers as the backbone's.
    With (images, labels) of the old task as `source`: its accuracy `before` and `after`, and the
    difference, `forgetting`.
    """
    device = next(net.backbone.parameters()).device
    found: dict[str, float] = {}
    with OldAnswers(net, name).watched() as old, eval_mode(net):
        same = n = 0
        for images, *_ in loader:
            net(images.to(device), domain=name)
            same += int((old.now().argmax(1) == old.before(images.to(device)).argmax(1)).sum())
            n += len(images)
        found["agreement"] = 100 * same / max(n, 1)
        if source is not None:
            before = after = n = 0
            for images, labels in source:
                images, labels = images.to(device), labels.to(device)
                net(images, domain=name)
                after += int((old.now().argmax(1) == labels).sum())
                before += int((old.before(images).argmax(1) == labels).sum())
                n += len(images)
            found["before"], found["after"] = 100 * before / max(n, 1), 100 * after / max(n, 1)
            found["forgetting"] = found["before"] - found["after"]
    return found


def _head(net: MultiDomainNetwork) -> nn.Module:
    assert net.head_name is not None
    return net.backbone.get_submodule(net.head_name)
