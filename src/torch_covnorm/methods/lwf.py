"""Learning without forgetting (Li & Hoiem 2017): fine-tune all, and keep the old head's answers.

The shared weights change, so this is a fork of the network: the domain gets its own copy of every
weight, of the old head too, and the backbone itself stays as it was.
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
from ..training.batches import images_of


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
    if net.head_name not in domain.weights:
        domain.weights[net.head_name] = CopiedWeights(_head(net))
    return domain


class OldAnswers:
    """The fork's answers on the old task, from the features of the newest forward pass."""

    def __init__(self, net: MultiDomainNetwork, name: str) -> None:
        self.net, self.domain = net, net.domain(name)
        if self.domain.head is None or str(net.head_name) not in self.domain.weights:
            raise CovNormError(
                f"domain {name!r} is no fork with an old head: adapt one with method='lwf'"
            )
        self.features: Tensor | None = None
        self.answer: Tensor | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[OldAnswers]:
        """Inside, forward passes of the domain are seen."""
        thread = threading.get_ident()

        def see(_: nn.Module, args: tuple[Tensor], answer: Tensor) -> None:
            if threading.get_ident() == thread:
                self.features, self.answer = args[0], answer

        def compare(_: nn.Module, args: Any, kwargs: dict[str, Any], answer: Any) -> None:  # noqa: ARG001
            ours = kwargs.get("domain") == self.domain.name and threading.get_ident() == thread
            if ours and answer is not self.answer:
                raise CovNormError(
                    "lwf compares the answers of heads, and this backbone does more behind its "
                    f"head {self.net.head_name!r}: choose the last layer with head="
                )

        assert self.domain.head is not None
        hooks = (
            self.domain.head.register_forward_hook(see),
            self.net.register_forward_hook(compare, with_kwargs=True),
        )
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            self.features = self.answer = None

    def now(self) -> Tensor:
        """(n, old classes): the old head, as the fork has it, on the features seen last."""
        assert self.features is not None
        head = _head(self.net)
        own = self.domain.weights[str(self.net.head_name)].parameters_for(head)
        return shallow_copy(head, own)(self.features)

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
    found: dict[str, float] = {}
    with OldAnswers(net, name).watched() as old, eval_mode(net):
        answers = [_answers(old, name, images_of(batch)) for batch in loader]
        found["agreement"] = _percent([(after == before) for before, after in answers])
        if source is not None:
            truth = [(*_answers(old, name, x), torch.as_tensor(y).cpu()) for x, y in source]
            found["before"] = _percent([before == y for before, _, y in truth])
            found["after"] = _percent([after == y for _, after, y in truth])
            found["forgetting"] = found["before"] - found["after"]
    return found


def _answers(old: OldAnswers, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """The old task's classes as the backbone and as the fork names them."""
    images = images.to(next(old.net.backbone.parameters()).device)
    old.net(images, domain=name)
    return old.before(images).argmax(1).cpu(), old.now().argmax(1).cpu()


def _percent(right: list[Tensor]) -> float:
    n = sum(len(r) for r in right)
    if n == 0:
        raise CovNormError("the loader gave no images to measure forgetting on")
    return 100 * sum(int(r.sum()) for r in right) / n


def _head(net: MultiDomainNetwork) -> nn.Module:
    assert net.head_name is not None
    return net.backbone.get_submodule(net.head_name)
