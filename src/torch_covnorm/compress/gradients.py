"""Measure how sensitive the loss is to each direction of A's output: G = E[g gᵀ] at every site.

g is the gradient of the log-likelihood at A's output y. With labels drawn from the model itself,
E[g gᵀ] is the Fisher information. `normalize_(metric="loss")` compares directions in this metric,
within a site and across sites.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters import LinearMap
from ..errors import CovNormError, at_site, check_choice
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode, stepwise
from ..stats.moments import Moments
from ..training.batches import as_loader, labels_of
from .collect import maps_of

Metric = Literal["variance", "loss"]
Labels = Literal["model", "given"]
PARTS = 4


class GradientMoments:
    """Streaming E[g gᵀ] of gradients g (rows, d): mergeable and exact, like `Moments`.

    Images go to four parts in turn. The spread of the parts gives the standard error of whatever is
    computed from the whole.
    """

    def __init__(self, d: int, device: torch.device | str | None = None) -> None:
        self.parts = [Moments(d, device) for _ in range(PARTS)]

    @property
    def d(self) -> int:
        """Number of channels."""
        return self.parts[0].d

    @property
    def images(self) -> int:
        """Number of images."""
        return sum(part.images for part in self.parts)

    def update(self, g: Tensor, spatial: bool = True) -> None:
        """Add a batch (n, d, h, w), or (n, …, d) if not `spatial`: for each of the n images, the
        gradient of its own log-likelihood."""
        start = self.images  # any split into batches deals the images to the same parts
        for i, part in enumerate(self.parts):
            share = g[(i - start) % PARTS :: PARTS]
            if len(share):
                rows = share if spatial and g.ndim == 4 else share.reshape(-1, g.shape[-1])
                part.update(rows, images=len(share))

    def second(self, part: int | None = None) -> Tensor:
        """Return G = Σ g gᵀ / images (d, d): a sum over positions and a mean over images.

        ``½ tr(G Cov(δ))`` is then the loss per image of an error δ of y, so sites of different
        resolution are comparable. `part` selects one of the parts.
        """
        whole = self.parts[0] if part is None else self.parts[part]
        for other in self.parts[1:] if part is None else ():
            whole = whole.merge(other)
        if whole.images == 0:
            raise CovNormError("no gradients were collected: the loader yielded no images")
        return (whole.scatter + whole.n * torch.outer(whole.mean, whole.mean)) / whole.images

    def merge(self, other: GradientMoments) -> GradientMoments:
        """Return the moments of both sets of images; neither argument changes."""
        new = GradientMoments(self.d)
        new.parts = [a.merge(b) for a, b in zip(self.parts, other.parts, strict=True)]
        return new

    def all_reduce_(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge in place over the processes of a group."""
        for part in self.parts:
            part.all_reduce_(group)

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors by name, ready for safetensors."""
        parts = enumerate(self.parts)
        return {f"{i}/{k}": v for i, part in parts for k, v in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        for i, part in enumerate(self.parts):
            part.load_state_dict({k: state[f"{i}/{k}"] for k in part.state_dict()})

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> GradientMoments:
        """Return the moments whose `state_dict` this is."""
        moments = cls(len(state["0/mean"]))
        moments.load_state_dict(state)
        return moments


def gradients_at(
    site: str, A: LinearMap, gradients: Mapping[str, GradientMoments] | None
) -> Tensor:
    """Return G (d_out, d_out) of a site; an error if it is missing or does not fit A."""
    found = (gradients or {}).get(site)
    if found is None or found.d != len(A.bias):
        raise CovNormError(
            f"site {site!r}: metric='loss' needs gradients of {len(A.bias)} channels: use "
            "cn.collect_gradients"
        )
    return found.second().cpu()


def predicted_loss(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    moments: Mapping[str, Moments],
    gradients: Mapping[str, GradientMoments],
) -> dict[str, float | None]:
    """Predict the loss per image of replacing every A by B, to second order: {"loss", "error"}.

    The loss is ``½ Σ tr(G (A - B) Sigma (A - B)^T)`` over the sites, which are treated as
    independent. The error is its standard error, from the spread of the gradients' parts.
    """
    changes = {s: (before[s] - after[s]).cpu().double() for s in before}
    errors = {s: D @ moments[s].covariance.cpu() @ D.T for s, D in changes.items()}

    def cost(part: int | None) -> float:
        seconds = {s: gradients[s].second(part).cpu().double() for s in errors}
        return 0.5 * sum(float((seconds[s] * E).sum()) for s, E in errors.items())

    full = [i for i in range(PARTS) if all(g.parts[i].images for g in gradients.values())]
    costs = torch.tensor([cost(i) for i in full], dtype=torch.float64)
    error = float(costs.std() / len(costs) ** 0.5) if len(costs) > 1 else None
    return {"loss": cost(None), "error": error}


def collect_gradients(
    net: MultiDomainNetwork,
    name: str,
    loader: Iterable[Any],
    images: int | None = 512,
    *,
    labels: Labels = "model",
    seed: int = 0,
) -> dict[str, GradientMoments]:
    """Return {site: E[g gᵀ] at A's output y}, in eval mode; the network does not change.

    Args:
        loader: yields (images, labels), or only images if the model draws the labels.
        images: use at most this many, spread evenly over a loader that has a length, otherwise the
            first ones; None uses all.
        labels: "model" draws them from the network's predictions (the Fisher information), "given"
            takes the loader's (the empirical Fisher).
    """
    check_choice("labels", labels, get_args(Labels))
    domain, device = net.domain(name), next(net.backbone.parameters()).device
    maps = maps_of(net, name)
    found = {site: GradientMoments(len(A.bias), device) for site, A in maps.items()}
    draw, thread = torch.Generator().manual_seed(seed), threading.get_ident()
    calls: list[tuple[str, Tensor]] = []  # a site may run more than once

    def keep(site: str, _: nn.Module, __: Any, y: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        calls.append((site, y if y.requires_grad else y.requires_grad_()))
        return y.clone()  # the layers that follow may work in place

    seen = 0
    with ExitStack() as hooks, eval_mode(net.backbone, domain), stepwise(), torch.enable_grad():
        for site, A in maps.items():
            hooks.enter_context(A.register_forward_hook(partial(keep, site)))
        batches = as_loader(loader, domain.preprocessing, labels=False)
        for x, given in _spread(batches, images, labels):
            logits = _scores(net(x.to(device), domain=name), name)
            if labels == "model":
                chances = logits.detach().float().softmax(1).cpu()
                y = torch.multinomial(chances, 1, generator=draw)[:, 0]
            else:
                y = labels_of(given, domain)
            likelihood = -F.cross_entropy(logits, y.to(device), reduction="sum")
            of_calls = torch.autograd.grad(likelihood, [output for _, output in calls])
            by_site: dict[str, list[Tensor]] = {}
            for (site, _), g in zip(calls, of_calls, strict=True):
                by_site.setdefault(site, []).append(g)
            calls.clear()
            for site, gradients in by_site.items():
                with at_site(site):
                    rows = _by_image(gradients, maps[site].spatial, len(x))
                    found[site].update(rows, spatial=False)
            seen += len(x)
    if seen == 0:
        raise CovNormError(f"domain {name!r}: the loader yielded no images")
    return found


def _spread(
    loader: Iterable[Any], images: int | None, labels: Labels
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (images, labels or None), at most `images` of them, spread over the whole loader.

    The loader may be sorted by class, and the first images would then show only the first classes.
    """
    total, passed, left = 1, 0, images
    for batch in loader:
        x, y = batch
        if labels == "given" and y is None:
            raise CovNormError(
                "labels='given' needs a loader of (images, labels), but it yields only images"
            )
        y = y if labels == "given" else None
        if images is not None and left is not None:
            if passed == 0:
                total = max(images, operator.length_hint(loader) * len(x))
            share = torch.arange(passed, passed + len(x) + 1) * images // total
            taken = share.diff().nonzero()[:left, 0]
            passed, left = passed + len(x), left - len(taken)
            x, y = x[taken], None if y is None else y[taken]
        if len(x):
            yield x, y
        if left == 0:
            return


def _scores(logits: Any, name: str) -> Tensor:
    """Check that the network's output is one score per class, and finite."""
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(getattr(logits, "shape", ()))
        raise CovNormError(
            f"domain {name!r}: the network returns shape {shape}, not one score per class (images, "
            "classes). metric='loss' is for classification."
        )
    if not logits.isfinite().all():
        raise CovNormError(
            f"domain {name!r}: the network returns NaN or Inf. Check the input images."
        )
    return logits


def _by_image(calls: Sequence[Tensor], spatial: bool, images: int) -> Tensor:
    """Return (images, rows, d): all rows of each image, over every call and every window."""
    rows = []
    for g in calls:
        if len(g) % images:
            raise CovNormError(
                f"{len(g)} gradients for {images} images cannot be assigned to images"
            )
        last = g.movedim(1, -1) if spatial and g.ndim == 4 else g
        rows.append(last.reshape(images, -1, last.shape[-1]))
    return torch.cat(rows, 1)
