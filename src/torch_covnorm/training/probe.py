"""A linear head on the features of the bare backbone: the baseline for every method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from .batches import images_of

DECAYS = (1e-4, 1e-3, 1e-2)
LOGISTIC_CLASSES = 1000  # at most; with more, ridge regression is much faster


@torch.no_grad()
def features(net: MultiDomainNetwork, loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Return the inputs of the bare backbone's head, (n, d), and the labels (n,)."""
    if net.head_name is None:
        raise CovNormError(
            "the network has no head, so there is no layer to read features from. "
            "Build it with head=NAME."
        )
    head, device = net.backbone.get_submodule(net.head_name), next(net.backbone.parameters()).device
    seen: list[Tensor] = []
    labels = []
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(1).cpu()))
    with hook, eval_mode(net.backbone):
        for batch in loader:
            net.backbone(images_of(batch).to(device))
            labels.append(torch.as_tensor(batch[1]))
    return torch.cat(seen), torch.cat(labels).long()


def linear_accuracy(
    net: MultiDomainNetwork,
    classes: int,
    train: Iterable[Any],
    val: Iterable[Any] | None,
    test: Iterable[Any],
) -> float:
    """Return the accuracy on `test`, in percent, of a linear head on the backbone's features.

    The head is logistic regression on `train`. `val` selects the weight decay; without it the
    middle one is used. With more than 1000 classes it is ridge regression, which has a closed form.
    """
    x, y = features(net, train)
    mean, std = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    decays = DECAYS if val is not None else DECAYS[1:2]
    solve = _logistic if classes <= LOGISTIC_CLASSES else _ridge
    heads = [solve((x - mean) / std, y, classes, decay) for decay in decays]

    def accuracy(data: tuple[Tensor, Tensor], head: Tensor) -> float:
        x, y = data
        predicted = _logits((x - mean) / std, head).argmax(1)
        return 100 * int((predicted == y).sum()) / len(y)

    if val is not None:
        held_out = features(net, val)
        heads.sort(key=lambda head: accuracy(held_out, head))
    return accuracy(features(net, test), heads[-1])


def _logits(x: Tensor, head: Tensor) -> Tensor:
    return x @ head[:-1] + head[-1]


def _logistic(x: Tensor, y: Tensor, classes: int, decay: float) -> Tensor:
    """Return weights (d + 1, classes), bias last, that minimize cross-entropy + decay·|w|²."""
    with torch.enable_grad():
        head = torch.zeros(x.shape[1] + 1, classes, requires_grad=True)
        solver = torch.optim.LBFGS(
            [head], max_iter=60, history_size=10, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            solver.zero_grad()
            value = F.cross_entropy(_logits(x, head), y) + decay * head[:-1].square().sum()
            value.backward()
            return value

        solver.step(loss)
    return head.detach()


def _ridge(x: Tensor, y: Tensor, classes: int, decay: float) -> Tensor:
    """Return such weights by least squares: (XᵀX / n + decay) w = Xᵀ(Y − 1/classes) / n."""
    n, d = x.shape
    sums = torch.zeros(classes, d).index_add_(0, y, x).T  # XᵀY; the columns of X have mean 0
    gram = x.T @ x / n + decay * torch.eye(d)
    return torch.cat([torch.linalg.solve(gram, sums / n), y.bincount(minlength=classes)[None] / n])
