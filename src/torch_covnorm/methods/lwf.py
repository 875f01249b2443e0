"""Learning without forgetting (Li & Hoiem 2017): fine-tune all, and keep the old head's outputs.

The shared weights would change, so this is a fork of the network: the domain gets a copy of every
weight, including the old head, and the backbone itself stays as it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters import CopiedWeights, shallow_copy
from ..errors import CovNormError
from ..network.domain import Domain
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from ..training.batches import as_loader


def distillation(logits: Tensor, targets: Tensor, T: float = 2.0) -> Tensor:
    """Return ``-sum softmax(targets / T) log softmax(logits / T)``, averaged over n images.

    Both are (n, classes).
    """
    return F.cross_entropy(logits / T, (targets / T).softmax(1))


def fork_(net: MultiDomainNetwork, name: str) -> Domain:
    """Give a domain with adapter="own" a copy of the backbone's head too, for the old task."""
    domain = net.domain(name)
    if net.head_name is None:
        raise CovNormError(
            "lwf keeps the outputs of the backbone's head, but this backbone has no head: choose "
            "one with head="
        )
    if net.head_name not in domain.weights:
        domain.weights[net.head_name] = CopiedWeights(_head(net))
    return domain


class OldHead:
    """The old task's outputs of a fork, from the features of its latest forward pass."""

    def __init__(self, net: MultiDomainNetwork, name: str) -> None:
        self.net, self.domain = net, net.domain(name)
        if self.domain.head is None or str(net.head_name) not in self.domain.weights:
            raise CovNormError(
                f"domain {name!r} is not a fork with an old head: adapt one with method='lwf'"
            )
        self.features: Tensor | None = None
        self.output: Tensor | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[OldHead]:
        """Observe the forward passes of the domain inside."""
        thread = threading.get_ident()

        def see(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if threading.get_ident() == thread:
                self.features, self.output = args[0], output

        def compare(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
            ours = kwargs.get("domain") == self.domain.name and threading.get_ident() == thread
            if ours and output is not self.output:
                raise CovNormError(
                    "lwf compares the outputs of heads, but this backbone has layers after its "
                    f"head {self.net.head_name!r}: choose the last layer with head="
                )

        assert self.domain.head is not None
        last = self.net.register_forward_hook(compare, with_kwargs=True)
        with self.domain.head.register_forward_hook(see), last:
            try:
                yield self
            finally:
                self.features = self.output = None

    def now(self) -> Tensor:
        """Return the fork's old head on the latest features: (n, old classes)."""
        assert self.features is not None
        head = _head(self.net)
        weights = self.domain.weights[str(self.net.head_name)].parameters_for(head)
        return shallow_copy(head, weights)(self.features)

    @torch.no_grad()
    def before(self, images: Tensor) -> Tensor:
        """Return the targets, the outputs of the unchanged backbone: (n, old classes)."""
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
    """Measure what a fork has forgotten, in percent and points.

    `agreement` is the share of the loader's images on which the fork's old head agrees with the
    backbone's. With (images, labels) of the old task as `source`, `before` and `after` are its
    accuracies, and `forgetting` is their difference.
    """
    found: dict[str, float] = {}
    with OldHead(net, name).watching() as old, eval_mode(net):
        inputs = old.domain.preprocessing
        batches = as_loader(loader, inputs, labels=False)
        classes = [_old_classes(old, name, images) for images, _ in batches]
        found["agreement"] = _percent([(after == before) for before, after in classes])
        if source is not None:
            batches = as_loader(source, inputs)
            truth = [(*_old_classes(old, name, x), y.cpu()) for x, y in batches]
            found["before"] = _percent([before == y for before, _, y in truth])
            found["after"] = _percent([after == y for _, after, y in truth])
            found["forgetting"] = found["before"] - found["after"]
    return found


def _old_classes(old: OldHead, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the old task's classes as the backbone and as the fork predict them."""
    images = images.to(next(old.net.backbone.parameters()).device)
    old.net(images, domain=name)
    return old.before(images).argmax(1).cpu(), old.now().argmax(1).cpu()


def _percent(right: list[Tensor]) -> float:
    n = sum(len(r) for r in right)
    if n == 0:
        raise CovNormError("the loader yielded no images to measure forgetting on")
    return 100 * sum(int(r.sum()) for r in right) / n


def _head(net: MultiDomainNetwork) -> nn.Module:
    assert net.head_name is not None
    return net.backbone.get_submodule(net.head_name)
