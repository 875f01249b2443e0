"""One domain on its way through a method: what the recipes of `methods` are made of.

A run seeds the random numbers stage by stage; `adapt` keeps the caller's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import ConvAdapter, FullMap
from ..compress.covnorm import collect
from ..compress.geometric import full_maps
from ..compress.gradients import GradientMoments, collect_gradients
from ..compress.joint import Joined
from ..compress.precision import PRECISIONS, as_stored, round_, storage_of
from ..errors import CovNormError
from ..network.domain import Domain, class_names
from ..network.network import MultiDomainNetwork
from ..stats.moments import Moments
from ..training.batches import images_of
from ..training.evaluation import evaluate
from ..training.fit import Penalty, fit
from ..training.progress import Progress, Report, WatchedLoader
from ..training.schedules import Training
from ..training.seeds import seed_all, seed_loader
from ..training.snapshot import load_states, restore_, save_states, tensors_of


@dataclass
class Run:
    """A domain, its data and its settings; `stages` and `seconds` fill as the recipe goes."""

    net: MultiDomainNetwork
    name: str
    train: Iterable[Any]
    val: Iterable[Any] | None
    options: dict[str, Any]
    training: Training
    tuning: Training
    classes: Sequence[str] | int | None = None
    start: str | None = None
    statistics: Iterable[Any] | None = None
    test: Iterable[Any] | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    progress: bool | Report | None = None
    snapshot: Path | None = None
    every: float = 20.0
    stages: dict[str, float | None] = field(default_factory=dict)
    tested: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    moments: dict[str, Moments] | None = None
    forgetting: dict[str, float] | None = None
    joined: Joined | None = None
    predicted: dict[str, float | None] | None = None
    declined: bool = False
    floor: float = -math.inf  # of the validation accuracy: `max_drop` promises it
    dtype: str | None = None
    storage: dict[str, dict[str, Any]] | None = None

    @property
    def domain(self) -> Domain:
        """The domain, once it is there."""
        return self.net.domain(self.name)

    def add(self, adapter: str, rank: int | float | None = None) -> None:
        """The domain with untrained adapters of this kind; one that exists must have them."""
        if self.name in self.net.domains:
            self._check_kind(adapter, rank)
            self._check_classes()
            return
        classes = self.classes
        if classes is None:
            classes = max(
                count_classes(loader) for loader in (self.train, self.val) if loader is not None
            )
        seed_all(self.training.seed, "add")
        self.net.add_domain(self.name, classes, adapter, rank)

    def add_trained(self) -> None:
        """The domain with a trained full A at every site: `start`'s, its own, or trained now."""
        if self.start is not None:
            if self.name in self.net.domains:
                raise CovNormError(f"domain {self.name!r} exists already: leave out start=")
            full_maps(self.net.domain(self.start))
            self.net.copy_domain(self.start, self.name)
            self._check_classes()
        elif self._must_train():
            self.add(self._kind())
            self.fit("train", self.training)
        full_maps(self.domain)
        if self.start is not None:
            self.note("train")

    def fit(
        self,
        stage: str,
        training: Training,
        parameters: Sequence[nn.Parameter] | None = None,
        penalty: Penalty | None = None,
    ) -> None:
        """Train what trains; a stage of its own in the snapshot."""
        done = fit(
            self.net,
            self.name,
            self.train,
            self.val,
            training,
            parameters=parameters,
            penalty=penalty,
            augment=self.augment,
            progress=self.progress,
            stage=stage,
            snapshot=None if self.snapshot is None else self.snapshot / stage,
            every=self.every,
        )
        self.seconds[stage] = done.seconds
        self.stages[stage] = done.accuracy
        self._test(stage)

    def tune(self) -> None:
        """The stage behind the compression, which may decline."""
        with self.may_decline():
            self.fit("tune", self.tuning)

    @contextlib.contextmanager
    def may_decline(self) -> Iterator[None]:
        """What is trained inside stays, unless it validates clearly worse than what was there.

        Clearly: by more than one standard error of the validation accuracy, since training has seen
        more images than those; or below `floor`, what `max_drop` promises. Both are measured as
        their files would have them, in the run's `dtype`.
        """
        if self.val is None:
            yield
            return
        before = {k: t.clone() for k, t in tensors_of(self.domain).items()}
        was, error = self._validated()
        yield
        now, _ = self._validated()
        if not (now >= was or now >= max(was - error, self.floor)):
            restore_(self.domain, before)
            self.declined = True

    def _validated(self) -> tuple[float, float]:
        """Accuracy and its standard error; less loss, and none, where the labels have no accuracy.

        Of what no file could hold it is −∞.
        """
        assert self.val is not None
        floats = (t for t in tensors_of(self.domain).values() if t.is_floating_point())
        if not all(t.isfinite().all() for t in floats):
            return -math.inf, 0.0
        with as_stored(self.net, self.name, self.dtype):
            found = evaluate(self.net, self.name, self.val)
        if found.accuracy is None:
            return -found.loss, 0.0
        share = found.accuracy / 100
        return found.accuracy, 100 * math.sqrt(share * (1 - share) / found.n)

    def round(self) -> None:
        """Keep what each precision would cost; then be what the file in `dtype` will hold."""
        if self.dtype is not None:
            self.storage = storage_of(self.net, self.name, self.val)
            round_(self.net, self.name, PRECISIONS[self.dtype])

    def collect(self) -> dict[str, Moments]:
        """The moments of A's input; a stage of its own in the snapshot."""
        folder = None if self.snapshot is None else self.snapshot / "moments"
        settings = {"backbone": self.net.fingerprint, "domain": self.name, "stage": "moments"}
        with self.timed("collect"):
            moments = None
            if folder is not None:
                moments = load_states(folder, settings, lambda s: Moments(len(s["mean"])))
            if moments is None:
                images = self.train if self.statistics is None else self.statistics
                seed_loader(images, self.training.seed, "moments")
                moments = collect(self.net, self.name, self._watched("collect", images))
                if folder is not None:
                    save_states(folder, settings, moments)
        self.moments = moments
        return moments

    def collect_gradients(self) -> dict[str, GradientMoments]:
        """E[g gᵀ] at A's output, for the metric of the loss; a stage of its own in the snapshot.

        Of the validation images, where there are any: of its training images a network is so sure
        that all but a few have no gradient.
        """
        settings = {"backbone": self.net.fingerprint, "domain": self.name, "stage": "gradients"}
        folder = None if self.snapshot is None else self.snapshot / "gradients"
        with self.timed("gradients"):
            if folder is not None:
                make = lambda s: GradientMoments(len(s["0/mean"]))  # noqa: E731
                if (kept := load_states(folder, settings, make)) is not None:
                    return kept
            images = self.train if self.statistics is None else self.statistics
            images = images if self.val is None else self.val
            seed_loader(images, self.training.seed, "gradients")
            watched = self._watched("gradients", images)
            found = collect_gradients(self.net, self.name, watched, seed=self.training.seed)
            if folder is not None:
                save_states(folder, settings, found)
        return found

    def _watched(self, stage: str, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches, and a word for each to whoever watches the progress."""
        start, images = time.perf_counter(), 0
        steps = len(batches) if isinstance(batches, Sized) else None

        def tell(step: int, batch: Any) -> None:
            nonlocal images
            images += len(images_of(batch))
            self.tell(stage, step, steps, images / (time.perf_counter() - start))

        return WatchedLoader(batches, tell)

    def tell(self, stage: str, step: int, steps: int | None, rate: float = 0.0) -> None:
        """Say how far a stage is that does not train."""
        if callable(self.progress):
            self.progress(Progress(stage, 0, 1, step, steps, None, None, rate, self.name))

    def note(self, stage: str) -> None:
        """Validate as it is now."""
        if self.val is not None:
            self.stages[stage] = evaluate(self.net, self.name, self.val).accuracy
        self._test(stage)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """The seconds of what is done inside; its random numbers are its own."""
        seed_all(self.training.seed, stage)
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def _test(self, stage: str) -> None:
        """Measure, and decide nothing by it."""
        if self.test is not None:
            self.tested[stage] = evaluate(self.net, self.name, self.test).accuracy

    def _kind(self) -> str:
        """The structure whose A is trained: that of an existing domain, else the option's."""
        if self.name in self.net.domains:
            kinds = {a.kind for _, a in self.domain.adapters.items() if a.A is not None}
            if len(kinds) == 1:
                return str(kinds.pop())
        return str(self.options.get("adapter", "residual"))

    def _check_classes(self) -> None:
        names = class_names(self.classes)
        if names is not None and len(names) != len(self.domain.classes or ()):
            raise CovNormError(
                f"classes={self.classes!r}: domain {self.name!r} has "
                f"{len(self.domain.classes or ())} already: leave them out, or give a new name"
            )

    def _must_train(self) -> bool:
        """Whether A is still to be trained, or was interrupted while it was."""
        if self.name not in self.net.domains or not trained(self.domain, self.net):
            return True
        return self.snapshot is not None and (self.snapshot / "train").exists()

    def _check_kind(self, adapter: str, rank: int | float | None) -> None:
        fresh = self.net.fresh_adapters(adapter, rank)
        there = self.domain.adapters
        for site, wanted in fresh.items():
            if wanted.config() != there[site].config():
                raise CovNormError(
                    f"domain {self.name!r} exists with other adapters than this method's (site "
                    f"{site!r}): give a new name, or remove it first"
                )
        if {w.kind for _, w in self.domain.weights.items()} != ({adapter} & {"own", "mask"}):
            raise CovNormError(f"domain {self.name!r} exists with other weights: give a new name")


def trained(domain: Domain, net: MultiDomainNetwork) -> bool:
    """Whether anything has trained it: its norms have counted batches or changed, or an A has.

    A DAN adapter on a network without norms has no counter, but starts as the identity.
    """
    for name, norm in domain.norms.items():
        before = net.backbone.get_submodule(name)
        if norm.num_batches_tracked is not None and torch.ne(
            norm.num_batches_tracked, before.get_buffer("num_batches_tracked")
        ):
            return True
        if norm.affine and not torch.equal(norm.weight, before.get_parameter("weight")):
            return True
    for _, adapter in domain.adapters.items():
        for norm in (adapter.B1, adapter.B2):
            if getattr(norm, "num_batches_tracked", None) is not None and norm.num_batches_tracked:
                return True
        if isinstance(adapter, ConvAdapter) and isinstance(adapter.A, FullMap):
            eye = torch.eye(len(adapter.A.A), device=adapter.A.A.device)
            if not torch.equal(adapter.A.A, eye.to(adapter.A.A)):
                return True
    return False


def count_classes(loader: Iterable[Any]) -> int:
    """How many classes the labels of a loader show: the largest label and one."""
    largest = -1
    for _, labels in loader:
        labels = torch.as_tensor(labels)
        if labels.is_floating_point() or (labels.numel() and int(labels.min()) < 0):
            raise CovNormError("labels are no class numbers from 0: give classes=")
        largest = max(largest, int(labels.max())) if labels.numel() else largest
    if largest < 0:
        raise CovNormError("the loader shows no labels: give classes=")
    return largest + 1
