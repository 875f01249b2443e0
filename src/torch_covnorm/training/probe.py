"""A linear head on the features of the bare backbone: the baseline for every method."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode
from .batches import as_loader

DECAYS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)  # of equally good ones, the first
FOLDS = 5
CROSS_VALIDATED = 2000  # images at most; with more, the validation images select the weight decay
LOGISTIC_CLASSES = 1000  # at most; with more, ridge regression is much faster


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A linear head ``W x + b`` on features x (n, d): weight W (classes, d) and bias b (classes,).

    decay: the weight decay that was selected.
    """

    weight: Tensor
    bias: Tensor
    decay: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        return x @ self.weight.T + self.bias


@torch.no_grad()
def features(
    net: MultiDomainNetwork, loader: Iterable[Any], domain: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the inputs (n, d) of the head of a domain or the bare backbone, and labels (n,)."""
    if net.head_name is None:
        raise CovNormError(
            "the network has no head, so there is no layer to read features from. "
            "Build it with head=NAME."
        )
    head, device = net.backbone.get_submodule(net.head_name), next(net.backbone.parameters()).device
    seen: list[Tensor] = []
    labels = []

    def see(_: Any, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].flatten(1).float().cpu())

    run = net.backbone if domain is None else partial(net, domain=domain)
    parts = [net.backbone] if domain is None else [net.backbone, net.domain(domain)]
    with head.register_forward_pre_hook(see), eval_mode(*parts):
        for images, given in as_loader(loader, getattr(net.backbone, "preprocessing", None)):
            run(images.to(device))
            labels.append(given)
    return torch.cat(seen), torch.cat(labels)


def fit_head(
    x: Tensor,
    y: Tensor,
    classes: int,
    held_out: tuple[Tensor, Tensor] | None = None,
    decay: float | None = None,
) -> LinearHead:
    """Fit a linear head to features x (n, d) and labels y (n,) by logistic regression.

    Unless it is given, the weight decay with the highest accuracy is used: in cross-validation over
    five parts if there are at most 2000 images, otherwise on the `held_out` features and labels.
    With more than 1000 classes it is ridge regression, which has a closed form.

    All features are divided by one number, the root of their mean variance. Features that hardly
    vary would be noise if each were divided by its own deviation.
    """
    mean, std = _scale(x)
    z = (x - mean) / std
    solve = _logistic if classes <= LOGISTIC_CLASSES else _ridge

    if decay is not None:
        pass
    elif len(y) <= CROSS_VALIDATED and classes <= LOGISTIC_CLASSES:
        decay = _cross_validated_decay(z, y, classes)
    elif held_out is not None:
        fresh, labels = (held_out[0] - mean) / std, held_out[1]

        def right(decay: float) -> int:
            return int(_logits(fresh, solve(z, y, classes, decay)).argmax(1).eq(labels).sum())

        decay = max(DECAYS, key=right)
    else:
        decay = DECAYS[2]
    head = solve(z, y, classes, decay)
    weight = (head[:-1] / std).T.contiguous()
    return LinearHead(weight, head[-1] - weight @ mean, decay)


def right_about(
    x: Tensor, mirrored: Tensor, y: Tensor, classes: int, decay: float
) -> tuple[Tensor, Tensor]:
    """Return whether heads are right about features x (n, d), and about those of the mirror images.

    Each image is judged by a head that was fitted to the other four fifths of the images.
    """
    mean, std = _scale(x)
    z, reflected = (x - mean) / std, (mirrored - mean) / std
    heads = _fold_heads(z, y, classes, decay)
    return _judged(z, y, heads), _judged(reflected, y, heads)


def _scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) of features x (n, d), and the root of their mean variance."""
    return x.mean(0), x.var(0, correction=0).mean().sqrt().clamp(min=1e-6)


def _cross_validated_decay(z: Tensor, y: Tensor, classes: int) -> float:
    """Return the weight decay whose heads are most often right about images they have not seen."""
    heads, right = None, {}
    for decay in DECAYS:  # each starts where the one before it ended
        heads = _fold_heads(z, y, classes, decay, heads)
        right[decay] = int(_judged(z, y, heads).sum())
    return max(DECAYS, key=lambda decay: right[decay])


def _fold_heads(
    z: Tensor, y: Tensor, classes: int, decay: float, start: Tensor | None = None
) -> Tensor:
    """Return heads (folds, d + 1, classes), each fitted to the images outside of one fold."""
    used = _fold_of(y) != torch.arange(FOLDS)[:, None]
    return _logistic(z, y, classes, decay, used.float(), start)


def _judged(z: Tensor, y: Tensor, heads: Tensor) -> Tensor:
    """Return whether each image (n,) is classified correctly by the head of its own fold."""
    right, fold = torch.zeros(len(y), dtype=torch.bool), _fold_of(y)
    for i, head in enumerate(heads):
        part = fold == i
        right[part] = _logits(z[part], head).argmax(1).eq(y[part])
    return right


def linear_accuracy(
    net: MultiDomainNetwork,
    classes: int,
    train: Iterable[Any],
    val: Iterable[Any] | None,
    test: Iterable[Any],
) -> float:
    """Return the accuracy on `test`, in percent, of a linear head on the backbone's features."""
    held_out = None if val is None else features(net, val)
    x, y = features(net, train)
    head = fit_head(x, y.long(), classes, held_out)
    x, y = features(net, test)
    return 100 * int((head(x).argmax(1) == y).sum()) / len(y)


def _fold_of(y: Tensor) -> Tensor:
    """Return the fold (n,) of each image: how many of its class come before it, modulo 5."""
    order = y.argsort(stable=True)
    starts = torch.cat([y.new_zeros(1), y.bincount().cumsum(0)[:-1]])
    ranks = torch.empty_like(y)
    ranks[order] = torch.arange(len(y)) - starts[y[order]]
    return ranks % FOLDS


def _logits(x: Tensor, head: Tensor) -> Tensor:
    return x @ head[:-1] + head[-1]


def _logistic(
    x: Tensor,
    y: Tensor,
    classes: int,
    decay: float,
    used: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Return weights (d + 1, classes), bias last, that minimize cross-entropy + decay·|w|².

    used: one problem per row (problems, n), 1 for the images that it is fitted to. The problems are
    solved at once, from weights (problems, d + 1, classes), `start` or 0, and returned in that
    shape.
    """
    alone = used is None
    used = torch.ones(1, len(y)) if used is None else used
    share = (used / used.sum(1, keepdim=True).clamp(min=1)).T
    shape = len(used), x.shape[1] + 1, classes
    with torch.enable_grad():
        head = torch.zeros(shape[1], shape[0] * classes)  # the problems side by side
        if start is not None:
            head.copy_(start.movedim(0, 1).flatten(1))
        head.requires_grad_(True)
        solver = torch.optim.LBFGS(
            [head], max_iter=60, history_size=10, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            solver.zero_grad()
            logits = _logits(x, head).unflatten(1, (len(used), classes)).movedim(2, 1)
            losses = F.cross_entropy(logits, y[:, None].expand(-1, len(used)), reduction="none")
            value = (share * losses).sum() + decay * head[:-1].square().sum()
            value.backward()
            return value

        solver.step(loss)
    found = head.detach().unflatten(1, (shape[0], classes)).movedim(1, 0).contiguous()
    return found[0] if alone else found


def _ridge(x: Tensor, y: Tensor, classes: int, decay: float) -> Tensor:
    """Return such weights by least squares: (XᵀX / n + decay) w = Xᵀ(Y − 1/classes) / n."""
    n, d = x.shape
    sums = torch.zeros(classes, d).index_add_(0, y, x).T  # XᵀY; the columns of X have mean 0
    gram = x.T @ x / n + decay * torch.eye(d)
    return torch.cat([torch.linalg.solve(gram, sums / n), y.bincount(minlength=classes)[None] / n])
