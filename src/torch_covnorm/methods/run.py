"""One domain on its way through a method: the steps that the recipes are made of.

A run seeds the random numbers stage by stage; `adapt` restores the caller's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..adapters import ConvAdapter, FullMap
from ..compress.collect import collect
from ..compress.covnorm import decompose_sites
from ..compress.geometric import full_maps
from ..compress.gradients import GradientMoments, collect_gradients
from ..compress.precision import PRECISIONS, as_stored, round_, storage_of
from ..errors import CovNormError
from ..network.domain import Domain, class_names
from ..network.network import MultiDomainNetwork
from ..stats.decomposition import Decomposition
from ..stats.moments import Moments
from ..training.auto import Chosen, choose, clearly_worse, start_head_
from ..training.batches import images_of
from ..training.evaluation import correct, evaluate
from ..training.fit import Penalty, fit
from ..training.probe import LinearHead, features, fit_head
from ..training.progress import Progress, Report, WatchedLoader
from ..training.schedules import AUTO, Training
from ..training.seeds import seed_all, seed_loader
from ..training.snapshot import Snapshot, restore_, tensors_of
from .config import Config
from .result import Adapted

FEW = 100  # validation images that cannot tell a good domain from one some points worse
SHARES = (0.75, 0.5)  # of the trained parameters in an average with those at the start
REMEMBERED = 0.9  # of the training images that the best run knows, the mean of runs must know
NEXT_RUN = 1_000_003  # from the seed of one run to that of the next
Statistics = TypeVar("Statistics", Moments, GradientMoments)


@dataclass(kw_only=True)
class Run:
    """A domain, its data and its configuration; `result` is filled while the recipe runs.

    The data, `classes`, `start`, `augment`, `progress`, `snapshot`, `every` and `preprocessing` are
    as for `adapt`.
    keeps_trained: `result.trained` shall be a copy of the domain before compression. further: an
    existing domain with a trained A shall be trained further first.
    chosen: what `Training("auto")` became, once something has trained. new: the run has added the
    domain. released: the few validation images are training images now.
    """

    net: MultiDomainNetwork
    name: str
    train: Iterable[Any]
    val: Iterable[Any] | None = None
    config: Config
    classes: Sequence[str] | int | None = None
    start: str | None = None
    statistics: Iterable[Any] | None = None
    test: Iterable[Any] | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    progress: bool | Report | None = None
    snapshot: Path | None = None
    every: float = 20.0
    everything: Iterable[Any] | None = None
    keeps_trained: bool = False
    further: bool = False
    preprocessing: Any = None
    chosen: Chosen | None = field(init=False, default=None)
    new: bool = field(init=False, default=False)
    released: bool = field(init=False, default=False)
    result: Adapted = field(init=False)
    gradients: dict[str, GradientMoments] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.result = Adapted(domain=self.name, method=self.config.method)

    @property
    def domain(self) -> Domain:
        """The domain, once it has been added."""
        return self.net.domain(self.name)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the method."""
        return self.config.options

    # ── adding and training ──────────────────────────────────────────────────────────────────

    def add(self, adapter: str, rank: int | float | None = None) -> None:
        """Add the domain with untrained adapters of this kind; an existing one must have them."""
        if self.name in self.net.domains:
            self._check_kind(adapter, rank)
            self._check_classes()
            return
        classes, loaders = self.classes, (self.train, self.val)
        if classes is None:
            classes = max(count_classes(loader) for loader in loaders if loader is not None)
        seed_all(self.config.training.seed, "add")
        given = {"preprocessing": self.preprocessing, "norms": self.config.norms}
        self.net.add_domain(self.name, classes, adapter, rank, **given)
        self.new = True

    def add_trained(self) -> None:
        """Add the domain with a trained full A at every site: `start`'s, its own, or a new one."""
        if self.start is not None:
            if self.name in self.net.domains:
                raise CovNormError(f"domain {self.name!r} already exists: leave out start=")
            full_maps(self.net.domain(self.start))
            self.net.copy_domain(self.start, self.name)
            self._check_classes()
            self.note("train")
        elif self._must_train():
            self.add(self._kind())
            self.train_first()
        full_maps(self.domain)

    def train_first(self, penalty: Penalty | None = None) -> None:
        """Train the first stage, with the settings that the configuration gives or leaves open."""
        training = self.choose().training
        if self.further and training.head == "probe":
            self._refit_head()
        start, ends = self._state(), []
        for i in range(training.runs):
            restore_(self.domain, start)
            self.fit("train", training, penalty=penalty, run=i)
            ends.append(self._state())
        if len(ends) > 1:
            self._keep_mean(ends)
            self.note("train")
        if training.keep == "settled" and self.new and self.val is not None:
            self._average_with(start, self.val)
        self.result.trained = copy.deepcopy(self.domain) if self.keeps_trained else None

    def _refit_head(self) -> None:
        """Fit the head of a domain that trains further to its own features of all its images.

        Rows of new classes would otherwise start at 0.
        """
        if not isinstance(self.domain.head, nn.Linear) or self.domain.runs_own:
            return
        seed_all(self.config.training.seed, "head")
        x, y = features(self.net, self.train, self.name)
        start_head_(self.net, self.name, fit_head(x, y.long(), len(self.domain.head.weight)))

    def _state(self) -> dict[str, Tensor]:
        """Return a copy of every parameter and buffer of the domain."""
        return {k: t.clone() for k, t in tensors_of(self.domain).items()}

    def _keep_mean(self, ends: Sequence[dict[str, Tensor]]) -> None:
        """Keep the mean of several runs, or the best run if they are too far apart for a mean.

        They are if the mean is clearly less often right about the validation images than the best
        run, by more than a standard error of the paired difference. Without validation images: if
        it is right about less than 0.9 of the training images that the best run is right about.
        """
        images, mean = self.train if self.val is None else self.val, _mean(ends)
        restore_(self.domain, mean)
        if evaluate(self.net, self.name, images).accuracy is None:
            return  # the labels are not classes
        right = []
        for state in (mean, *ends):
            restore_(self.domain, state)
            right.append(correct(self.net, self.name, images))
        best = max(range(len(ends)), key=lambda i: int(right[1 + i].sum()))
        if self.val is not None:
            apart = clearly_worse(right[0], right[1 + best])
        else:
            apart = int(right[0].sum()) < REMEMBERED * int(right[1 + best].sum())
        restore_(self.domain, ends[best] if apart else mean)
        self.result.choices["kept"] = "the best run" if apart else "the mean of the runs"

    def _average_with(self, start: dict[str, Tensor], val: Iterable[Any]) -> None:
        """Average the trained parameters with those at the start, the linear head.

        The trained ones alone are kept, unless a smaller share of them is clearly more often right
        about the validation images, by more than a standard error of the paired difference.
        """
        trained, best = self._state(), 1.0
        right = correct(self.net, self.name, val)
        for share in SHARES:
            restore_(self.domain, _mean([start, trained], [1 - share, share]))
            averaged = correct(self.net, self.name, val)
            if clearly_worse(right, averaged):
                best, right = share, averaged
        restore_(self.domain, _mean([start, trained], [1 - best, best]))
        self.result.choices["share of the trained parameters"] = best
        if best != 1:
            self.note("train")

    def choose(self) -> Chosen:
        """Choose what the training leaves open, as one stage of the snapshot.

        The domain starts as chosen: with the linear head, and with calibrated norms.
        """
        if self.chosen is not None:
            return self.chosen
        training = self.config.training
        settings = {"backbone": self.net.fingerprint, "domain": self.name, "stage": "choose"}
        saved = None if self.snapshot is None else Snapshot(self.snapshot / "choose", settings)
        state = saved.load() if saved is not None else None
        if state is not None:
            self.chosen = Chosen.from_state(state["chosen"], training, self.augment)
            restore_(self.domain, state["domain"])
        else:
            with self.timed("choose"):
                self.chosen = choose(
                    self.net,
                    self.name,
                    self.train,
                    self.val,
                    training,
                    statistics=self.statistics,
                    augment=self.augment,
                    fresh=self.new,
                    progress=self.progress,
                )
            if saved is not None:
                chosen = self.chosen.state_dict()
                saved.save({"chosen": chosen, "domain": tensors_of(self.domain)})
        self.result.choices = dict(self.chosen.record)
        if self.chosen.head is not None:
            self._note_linear(self.chosen.head)
        self._release()
        return self.chosen

    def _release(self) -> None:
        """After the choices, train on the validation images too if they are few.

        They cannot tell a good domain from one some points worse, and as training images they help.
        But they can tell that a given rate was far off, so with one they stay held out.
        """
        training = self.config.training
        if self.everything is None or self.val is None or training.keep == "best":
            return
        if training.lr != AUTO or self._images(self.val) >= FEW:
            return
        self.train = self.statistics = self.everything
        self.val, self.released = None, True
        self.result.choices["validation images"] = "few, so used for training after the choices"
        seed_all(self.config.training.seed, "release")
        head = None if self.chosen is None else self.chosen.head
        if self.new and head is not None:
            x, y = features(self.net, self.everything)
            start_head_(
                self.net, self.name, fit_head(x, y.long(), len(head.bias), decay=head.decay)
            )

    def fit(
        self,
        stage: str,
        training: Training,
        parameters: Sequence[nn.Parameter] | None = None,
        penalty: Penalty | None = None,
        run: int = 0,
    ) -> None:
        """Train `parameters`, or all that is trainable, as one stage of the snapshot.

        run: which of the `runs` of the training, counted from 0; each has a seed of its own.
        """
        chosen = self.choose()
        done = fit(
            self.net,
            self.name,
            self.train,
            self.val,
            replace(training, runs=1, seed=training.seed + run * NEXT_RUN),
            parameters=parameters,
            criterion=chosen.criterion(next(self.net.backbone.parameters()).device),
            penalty=penalty,
            augment=chosen.augment,
            progress=self._progress_in(run, training.runs),
            stage=stage,
            snapshot=self.snapshot and self.snapshot / (f"{stage}-{run + 1}" if run else stage),
            every=self.every,
        )
        seconds, choices = self.result.seconds, self.result.choices
        seconds[stage] = seconds.get(stage, 0.0) + done.seconds
        if done.slowed:
            choices[f"slowed in {stage}"] = choices.get(f"slowed in {stage}", 0) + done.slowed
        if self.val is not None:
            self.result.stages[stage] = done.accuracy
        if training.runs == 1:  # of several, only the mean is tested
            self._test(stage)

    def _progress_in(self, run: int, runs: int) -> bool | Report | None:
        """Return the progress report of one of several runs: their epochs count as one stage."""
        report = self.progress
        if not callable(report) or runs == 1:
            return report
        return lambda p: report(replace(p, epoch=run * p.epochs + p.epoch, epochs=runs * p.epochs))

    def tune(self) -> None:
        """Train after the compression; keep the result unless it validates worse."""
        if self.released:
            return  # nothing could tell whether it helps
        with self.may_decline():
            self.fit("tune", self.tuning())

    def tuning(self) -> Training:
        """Return the settings of the stage after compression.

        What the configuration leaves open follows from the first stage: a third of its rate, half
        of its epochs, or as many as one of its runs if there are several.
        """
        tuning, first = self.config.tuning, self.choose().training
        if tuning.epochs == AUTO:
            epochs = first.epochs if first.runs > 1 else -(-first.epochs // 2)
            tuning = replace(tuning, epochs=epochs, stop_after=first.stop_after)
        return replace(tuning, lr=first.lr / 3) if tuning.lr == AUTO else tuning

    @contextlib.contextmanager
    def may_decline(self) -> Iterator[None]:
        """Keep what is trained inside, unless it validates clearly worse than before.

        Clearly means by more than one standard error of the validation accuracy, because training
        has seen other images than these. Both are measured
        as their files would hold them, in the run's precision.
        """
        if self.val is None:
            yield
            return
        before = self._state()
        was, error = self._validated(self.val)
        yield
        now, _ = self._validated(self.val)
        if not now >= was - error:
            restore_(self.domain, before)
            self.result.declined = True

    def _validated(self, val: Iterable[Any]) -> tuple[float, float]:
        """Return accuracy and its standard error, or −loss and 0 if the labels have no accuracy.

        −∞ if the domain holds numbers that no file could hold.
        """
        floats = (t for t in tensors_of(self.domain).values() if t.is_floating_point())
        if not all(t.isfinite().all() for t in floats):
            return -math.inf, 0.0
        with as_stored(self.net, self.name, self.result.dtype):
            found = evaluate(self.net, self.name, val)
        if found.accuracy is None:
            return -found.loss, 0.0
        return found.accuracy, found.standard_error

    # ── statistics ───────────────────────────────────────────────────────────────────────────

    def decompose(self) -> dict[str, Decomposition]:
        """Collect what the method needs and decompose each A, once."""
        moments, scaled = self.collect(), self.config.preset.scaled
        if self.config.in_loss:
            self.gradients = self.collect_gradients()
        with self.timed("normalize"):
            parts = decompose_sites(self.net, self.name, moments, self.gradients, scaled)
        self.result.parts = parts
        return parts

    def collect(self) -> dict[str, Moments]:
        """Collect the moments of A's input, as one stage of the snapshot."""
        images = self.train if self.statistics is None else self.statistics
        self.result.moments = self._collected("collect", "moments", Moments, collect, images)
        return self.result.moments

    def collect_gradients(self) -> dict[str, GradientMoments]:
        """Collect E[g gᵀ] at A's output for the metric of the loss, as one stage of the snapshot.

        It uses the validation images, if there are any: the network is so sure about its training
        images that most of them have no gradient.
        """
        loaders = (self.val, self.statistics, self.train)
        images = next(loader for loader in loaders if loader is not None)
        make = functools.partial(collect_gradients, seed=self.config.training.seed)
        return self._collected("gradients", "gradients", GradientMoments, make, images)

    def _collected(
        self,
        stage: str,
        what: str,
        statistics: type[Statistics],
        make: Callable[[MultiDomainNetwork, str, Iterable[Any]], dict[str, Statistics]],
        images: Iterable[Any],
    ) -> dict[str, Statistics]:
        """Return statistics by site: from the snapshot, or made now and saved there."""
        settings = {"backbone": self.net.fingerprint, "domain": self.name, "stage": what}
        saved = None if self.snapshot is None else Snapshot(self.snapshot / what, settings)
        with self.timed(stage):
            if saved is not None and (state := saved.load()) is not None:
                return {site: statistics.from_state(part) for site, part in state.items()}
            seed_loader(images, self.config.training.seed, what)
            found = make(self.net, self.name, self._watched(stage, images))
            if saved is not None:
                saved.save({site: part.state_dict() for site, part in found.items()})
        return found

    # ── measuring and reporting ──────────────────────────────────────────────────────────────

    def round(self) -> None:
        """Record what each precision would cost, then round to what the file will hold."""
        if self.result.dtype is not None:
            self.result.storage = storage_of(self.net, self.name, self.val)
            round_(self.net, self.name, PRECISIONS[self.result.dtype])

    def note(self, stage: str) -> None:
        """Validate the domain as it is now."""
        if self.val is not None:
            self.result.stages[stage] = evaluate(self.net, self.name, self.val).accuracy
        self._test(stage)

    def finish(self) -> Adapted:
        """Validate the finished domain and return the result."""
        if self._linear_is_better():
            self._keep_linear()
        else:
            self.note("final")
        self.result.accuracy = self.result.stages.get("final")
        self.result.parameters = self.net.num_parameters(self.name)
        return self.result

    def _note_linear(self, head: LinearHead) -> None:
        """Record the accuracy of the linear head on the bare features."""
        right = self.chosen.right if self.chosen is not None else None
        if right is not None:
            self.result.stages["linear"] = 100 * int(right.sum()) / len(right)
        if self.test is not None:
            x, y = features(self.net, self.test)
            answers = head(x).argmax(1)
            self.result.tested["linear"] = 100 * int((answers == y).sum()) / len(y)

    def _linear_is_better(self) -> bool:
        """Return whether the linear head validates clearly better than what was adapted.

        Clearly means by more than one standard error of the paired difference.
        """
        right = None if self.chosen is None else self.chosen.right
        if right is None or self.val is None or not self.new or self.domain.basis is not None:
            return False
        return clearly_worse(correct(self.net, self.name, self.val), right)

    def _keep_linear(self) -> None:
        """Replace the domain by the linear head on the frozen backbone: adapters of rank 0."""
        domain, head = self.domain, self.choose().head
        assert head is not None
        self.net.remove_domain(self.name)
        classes, processing = list(domain.classes or ()), domain.preprocessing
        self.net.add_domain(self.name, classes, "none", preprocessing=processing, norms="shared")
        if self.everything is not None:
            x, y = features(self.net, self.everything)
            head = fit_head(x, y.long(), len(classes), decay=head.decay)
        start_head_(self.net, self.name, head)
        self.result.linear = True
        self.result.stages["final"] = self.result.stages.get("linear")
        self._test("final")
        self.result.ranks = dict.fromkeys(self.net.sites, (0, 0))

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds spent inside to a stage, and give it random numbers of its own."""
        seed_all(self.config.training.seed, stage)
        start = time.perf_counter()
        yield
        seconds = self.result.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start

    def report(self, stage: str, step: int, steps: int | None, rate: float = 0.0) -> None:
        """Report the progress of a stage that does not train."""
        if callable(self.progress):
            self.progress(Progress(stage, 0, 1, step, steps, None, None, rate, self.name))

    def _watched(self, stage: str, batches: Iterable[Any]) -> Iterable[Any]:
        start, images, steps = time.perf_counter(), 0, operator.length_hint(batches) or None

        def report(step: int, batch: Any) -> None:
            nonlocal images
            images += len(images_of(batch))
            self.report(stage, step, steps, images / (time.perf_counter() - start))

        return WatchedLoader(batches, report)

    def _test(self, stage: str) -> None:
        if self.test is not None:
            self.result.tested[stage] = evaluate(self.net, self.name, self.test).accuracy

    @staticmethod
    def _images(loader: Iterable[Any]) -> int:
        return sum(len(images_of(batch)) for batch in loader)

    # ── checks ───────────────────────────────────────────────────────────────────────────────

    def _kind(self) -> str:
        """Return the adapter kind whose A is trained: an existing domain's, else the option's."""
        if self.name in self.net.domains:
            kinds = {a.kind for _, a in self.domain.adapters.items() if a.A is not None}
            if len(kinds) == 1:
                return str(kinds.pop())
        return str(self.options.get("adapter", "residual"))

    def _check_classes(self) -> None:
        names, existing = class_names(self.classes), len(self.domain.classes or ())
        if names is not None and len(names) != existing:
            raise CovNormError(
                f"classes={self.classes!r}: domain {self.name!r} already has {existing}: leave "
                "them out, or give a new name"
            )

    def _must_train(self) -> bool:
        """Return whether A still has to be trained, or its training was interrupted."""
        if self.further:
            return True
        if self.name not in self.net.domains or not trained(self.domain, self.net):
            return True
        return self.snapshot is not None and (self.snapshot / "train").exists()

    def _check_kind(self, adapter: str, rank: int | float | None) -> None:
        for site, wanted in self.net.fresh_adapters(adapter, rank).items():
            if wanted.config() != self.domain.adapters[site].config():
                raise CovNormError(
                    f"domain {self.name!r} already exists with other adapters than this method's "
                    f"(site {site!r}): give a new name, or remove it first"
                )
        if {w.kind for _, w in self.domain.weights.items()} != ({adapter} & {"own", "mask"}):
            raise CovNormError(
                f"domain {self.name!r} already exists with other weights: give a new name"
            )


def _mean(
    states: Sequence[dict[str, Tensor]], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """Return the weighted mean of states of one domain; numbers that count come from the last."""
    weights = weights or [1 / len(states)] * len(states)

    def mean(tensors: Sequence[Tensor]) -> Tensor:
        if not tensors[0].is_floating_point():
            return tensors[-1]
        parts = (w * t.double() for w, t in zip(weights, tensors, strict=True) if w)
        return functools.reduce(operator.add, parts).to(tensors[0])

    return {key: mean([state[key] for state in states]) for key in states[0]}


def trained(domain: Domain, net: MultiDomainNetwork) -> bool:
    """Return whether a domain was trained: its norms counted batches or changed, or its A changed.

    The bias of a new A is exactly 0, and a DAN adapter starts as the identity.
    """
    for name, norm in domain.norms.items():
        before, counted = net.backbone.get_submodule(name), norm.num_batches_tracked
        if counted is not None and counted != before.get_buffer("num_batches_tracked"):
            return True
        if norm.affine and not torch.equal(norm.weight, before.get_parameter("weight")):
            return True
    for _, adapter in domain.adapters.items():
        if any(getattr(norm, "num_batches_tracked", None) for norm in (adapter.B1, adapter.B2)):
            return True
        if adapter.A is not None and bool(adapter.A.bias.any()):
            return True
        if isinstance(adapter, ConvAdapter) and isinstance(adapter.A, FullMap):
            A = adapter.A.A
            if not torch.equal(A, torch.eye(len(A)).to(A)):
                return True
    return False


def count_classes(loader: Iterable[Any]) -> int:
    """Return the number of classes that the labels of a loader show: the largest label plus one."""
    largest = -1
    for _, labels in loader:
        labels = torch.as_tensor(labels)
        if labels.is_floating_point() or (labels.numel() and int(labels.min()) < 0):
            raise CovNormError("the labels are not class numbers from 0: give classes=")
        largest = max(largest, int(labels.max())) if labels.numel() else largest
    if largest < 0:
        raise CovNormError("the loader yields no labels: give classes=")
    return largest + 1
