"""How much the loss feels each direction of an adapter's output: E[g gᵀ] at every site.

g is the gradient of the log-likelihood at A's output y; with labels that the model itself draws,
E[g gᵀ] is the Fisher information. It is the metric in which `normalize_(metric="loss")` compares
what a direction is worth, within a site and across sites.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters import LinearMap
from ..errors import CovNormError, choices
from ..network.network import MultiDomainNetwork
from ..network.routing import eval_mode, stepwise
from ..stats.moments import Moments
from ..training.batches import images_of, labels_of

Metric = Literal["variance", "loss"]
Labels = Literal["model", "given"]
PARTS = 4


class GradientMoments:
    """Streaming E[g gᵀ] of gradients g (rows, d): mergeable and exact, as `Moments` are.

    The images are dealt to a few parts in turn, whose spread gives the standard error of whatever
    is computed from the whole.
    """

    def __init__(self, d: int, device: torch.device | str | None = None) -> None:
        self.parts = [Moments(d, device) for _ in range(PARTS)]

    @property
    def d(self) -> int:
        """How many channels."""
        return self.parts[0].d

    @property
    def images(self) -> int:
        """How many images were seen."""
        return sum(part.images for part in self.parts)

    def update(self, g: Tensor, spatial: bool = True) -> None:
        """Take in a batch: (n, d, h, w), or (n, …, d) where not `spatial`; for each of the n images
        the gradient of its own log-likelihood."""
        start = self.images  # so that any batches deal the images alike
        for i, part in enumerate(self.parts):
            share = g[(i - start) % PARTS :: PARTS]
            if len(share):
                rows = share if spatial and g.ndim == 4 else share.reshape(-1, g.shape[-1])
                part.update(rows, images=len(share))

    def second(self, part: int | None = None) -> Tensor:
        """G = Σ g gᵀ / images (d, d): summed over the positions of an image, a mean over images.

        ``½ tr(G Cov(δ))`` is then the loss, per image, of an error δ of y, so that sites of
        different resolution compare. `part`: of one part alone.
        """
        whole = self.parts[0] if part is None else self.parts[part]
        for other in self.parts[1:] if part is None else ():
            whole = whole.merge(other)
        if whole.images == 0:
            raise CovNormError("no gradients were collected: give images")
        return (whole.scatter + whole.n * torch.outer(whole.mean, whole.mean)) / whole.images

    def merge(self, other: GradientMoments) -> GradientMoments:
        """Those of both: a new one."""
        new = GradientMoments(self.d)
        new.parts = [a.merge(b) for a, b in zip(self.parts, other.parts, strict=True)]
        return new

    def all_reduce_(self, group: dist.ProcessGroup | None = None) -> None:
        """Those of all processes, in each."""
        for part in self.parts:
            part.all_reduce_(group)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name, ready for safetensors."""
        parts = enumerate(self.parts)
        return {f"{i}/{k}": v for i, part in parts for k, v in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        for i, part in enumerate(self.parts):
            own = part.state_dict()
            part.load_state_dict({k: state[f"{i}/{k}"] for k in own})


def gradients_at(
    site: str, A: LinearMap, gradients: Mapping[str, GradientMoments] | None
) -> Tensor:
    """G (d_out, d_out) of a site, for its A."""
    found = (gradients or {}).get(site)
    if found is None or found.d != len(A.bias):
        raise CovNormError(
            f"site {site!r}: metric='loss' needs gradients of {len(A.bias)} channels: "
            "cn.collect_gradients them"
        )
    return found.second().cpu()


def predicted_loss(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    moments: Mapping[str, Moments],
    gradients: Mapping[str, GradientMoments],
) -> dict[str, float | None]:
    """``{"loss", "error"}``: what replacing the A's of all sites costs an image, to second order.

    ``½ Σ tr(G (A - B) Sigma (A - B)^T)`` over the sites, and its standard error by the spread of
    the gradients' parts. Sites count as independent of each other.
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
    """{site: E[g gᵀ] at A's output y}, in eval mode; nothing of the network changes.

    Args:
        loader: yields (images, labels) or, where the model draws the labels, images.
        images: so many at most, evenly over a loader that has a length, else the first; None: all.
        labels: "model" draws them from the network's own answer (the Fisher), "given" takes the
            loader's (the empirical Fisher).
    """
    if labels not in get_args(Labels):
        raise CovNormError(f"labels={labels!r}: {choices(labels, get_args(Labels))}")
    domain, device = net.domain(name), next(net.backbone.parameters()).device
    maps = domain.maps
    if not maps:
        raise CovNormError(f"domain {name!r} has no matrix A to collect for: adapter='residual'")
    found = {site: GradientMoments(len(A.bias), device) for site, A in maps.items()}
    draw, thread = torch.Generator().manual_seed(seed), threading.get_ident()
    calls: list[tuple[str, Tensor]] = []  # a site may run more than once

    def keep(site: str) -> Any:
        def hook(_: nn.Module, __: Any, y: Tensor) -> Tensor | None:
            if threading.get_ident() != thread:
                return None  # another thread's call is not ours
            calls.append((site, y if y.requires_grad else y.requires_grad_()))
            return y.clone()  # what comes behind may work in place

        return hook

    hooks = [A.register_forward_hook(keep(site)) for site, A in maps.items()]
    seen = 0
    try:
        with eval_mode(net.backbone, domain), stepwise(), torch.enable_grad():
            for x, given in _spread(loader, images, labels):
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
                    try:
                        rows = _by_image(gradients, maps[site].spatial, len(x))
                        found[site].update(rows, spatial=False)
                    except CovNormError as error:
                        raise CovNormError(f"site {site!r}: {error}") from None
                seen += len(x)
    finally:
        for hook in hooks:
            hook.remove()
    if seen == 0:
        raise CovNormError(f"domain {name!r}: the loader gave no images")
    return found


def _spread(
    loader: Iterable[Any], images: int | None, labels: Labels
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(images, labels where they are given), `images` of them at most, from all of the loader.

    Its images may be sorted by class: the first ones alone would be of the first classes.
    """
    total, passed, left = 1, 0, images
    for batch in loader:
        x, y = images_of(batch), None
        if labels == "given":
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise CovNormError(
                    "labels='given': the loader yields images alone: let it yield (images, labels)"
                )
            y = torch.as_tensor(batch[1])
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
    """The answer of a network, if it is one that a label can be drawn from."""
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(getattr(logits, "shape", ()))
        raise CovNormError(
            f"domain {name!r}: the network answers {shape}, and not a score a class, (images, "
            "classes): metric='loss' is for classification"
        )
    if not logits.isfinite().all():
        raise CovNormError(f"domain {name!r}: the network answers NaN or Inf: look at the images")
    return logits


def _by_image(calls: Sequence[Tensor], spatial: bool, images: int) -> Tensor:
    """(images, rows, d): all rows of an image, of every call and every window of it."""
    rows = []
    for g in calls:
        if len(g) % images:
            raise CovNormError(f"{len(g)} gradients for {images} images: whose they are is unknown")
        last = g.movedim(1, -1) if spatial and g.ndim == 4 else g
        rows.append(last.reshape(images, -1, last.shape[-1]))
    return torch.cat(rows, 1)
