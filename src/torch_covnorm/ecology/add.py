"""`add`: from decoded images to a domain of the store, by any method; killed, it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import FullMap
from ..compress.covnorm import collect
from ..compress.precision import PRECISIONS, SMALLEST, round_, storage_of, stored_bytes
from ..data.decode import Decoded
from ..data.loader import Batches, as_input
from ..errors import CovNormError, choices
from ..methods.adapt import Adapted, adapt
from ..methods.recipes import METHODS
from ..methods.settings import check_for, settings_of
from ..network.network import MultiDomainNetwork
from ..training.probe import linear_accuracy
from ..training.progress import Reporter
from ..training.schedules import plain
from ..training.seeds import random_numbers_kept
from . import measure
from .prediction import probabilities
from .store import Details, Ecology
from .work import unfinished, workplace

TRAINED_BY = {"residual": "ra", "parallel": "parallel", "conv": "dan"}  # a full A of this kind
FULL = set(TRAINED_BY.values())
STAGES = ("train", "collect", "normalize", "tune")
LISTED = 1000  # files that a domain's details name


@dataclass(frozen=True)
class How:
    """How a domain is made: the method with its options, training, what is stored.

    options: of the method (variance=, budget=, …) and of its training (epochs=, lr=, …), as
        `adapt` takes them. dtype: "float32", "float16", "int8" for matrices with a scale a row, or
        for "covnorm" with max_drop= the "smallest" of them that keeps to it.
    """

    method: str = "covnorm"
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 32
    augment: Callable[[Tensor], Tensor] | None = None
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        known = ", ".join(PRECISIONS)
        if self.dtype not in (*PRECISIONS, SMALLEST):
            raise CovNormError(f"dtype={self.dtype!r}: choose {known}, or {SMALLEST}")
        if "seed" in self.options:
            raise CovNormError("seed= is one for all, splits too: give it by itself (--seed)")
        if "dtype" in self.options:
            raise CovNormError("dtype= is of what is stored: give it by itself (--dtype)")
        own, _, _ = settings_of(self.method, None, None, self.given)
        if self.dtype == SMALLEST and "dtype" not in own:
            raise CovNormError(
                f"dtype={SMALLEST!r} is for method 'covnorm' with max_drop: choose {known}"
            )
        if own.get("adapter", "residual") not in TRAINED_BY:
            raise CovNormError(f"adapter={own['adapter']!r}: {choices(own['adapter'], TRAINED_BY)}")

    @property
    def given(self) -> dict[str, Any]:
        """The options, and with them the dtype where it is the method's to choose or to keep."""
        known = METHODS[self.method].options if self.method in METHODS else ()
        return {**self.options, "dtype": self.dtype} if "dtype" in known else self.options

    def record(self) -> dict[str, Any]:
        """As plain JSON."""
        said = {"method": self.method, "batch": self.batch, "seed": self.seed, "dtype": self.dtype}
        augment = self.augment and [plain(self.augment), repr(self.augment)]
        return {**said, "augment": augment, **plain(self.options)}


def add(
    ecology: Ecology,
    name: str,
    data: Decoded,
    how: How | None = None,
    *,
    source: Mapping[str, Any] | None = None,
    replace: bool = False,
    fresh: bool = False,
    backbone: nn.Module | None = None,
    device: str | torch.device = "cpu",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Adapt the ecology's backbone to decoded images and keep the domain; returns its details.

    Stages are kept in a workplace inside the ecology: a run that was killed and is called again
    with the same settings goes on where it was. The store changes at the very end, in one step.

    Args:
        source: where the images came from, for later commands: "path", "seed".
        replace: the domain may be there already; until the end it stays as it is.
        fresh: forget the unfinished work of an earlier call.
        backbone: the caller's module, where the ecology was made with one.
    """
    how, reporter = how or How(), reporter or Reporter()
    if not replace:
        ecology.check_new(name)
    if METHODS[how.method].joint:
        raise CovNormError(
            f"method={how.method!r} is for several domains: add each by 'covnorm' or 'ra', then "
            "covnorm join"
        )
    busy = f"{ecology.folder}: domain {name!r} is being added by another process: wait for it"
    with workplace(ecology.workplace(name), busy, fresh) as work, random_numbers_kept():
        net = ecology.network(backbone).to(device)
        inputs = _inputs(ecology, data)
        _check(net, name, how, data)
        _try_one(net, data, inputs, ecology.backbone["preprocessing"]["size"])
        settings = {**how.record(), "domain": name, "data": data.digest}
        settings["backbone"] = ecology.backbone["fingerprint"]
        job = unfinished(work, settings)
        run = _Running(net, name, data, how, work, reporter, inputs)
        if "before" not in (known := job.load() or {}):
            reporter.stage("bare", "a linear head on the frozen network: what adapting has to beat")
            known = {"before": run.bare()}
            job.save(known)
        details = run.through_method(known["before"])
        facts = {**details.facts, "source": {**_balance(data), **_absolute(source or {})}}
        facts["history"] = [*_history(ecology, name), event("add", how.method, facts["results"])]
        reporter.stage("store", "its tensors, results and statistics go into the ecology")
        dtype = PRECISIONS[facts["results"]["dtype"]]
        ecology.put(net, {name: _with(details, facts)}, dtype, replace)
    return facts


@dataclass
class _Running:
    """One `add` under way."""

    net: MultiDomainNetwork
    name: str
    data: Decoded
    how: How
    work: Path
    reporter: Reporter
    inputs: dict[str, Any]

    @property
    def held_out(self) -> str:
        return measure.held_out(self.data)

    def batches(self, split: str, shuffle: bool = False, told: bool = False) -> Batches | None:
        if split not in self.data.splits:
            return None
        part, size = self.data.splits[split], self.how.batch if shuffle else 64
        progress = self.reporter.images if told else None
        return Batches(part.x, part.y, self.inputs, size, shuffle, progress)

    def bare(self) -> float:
        train, test = self.batches("train", told=True), self.batches(self.held_out)
        assert train is not None
        assert test is not None
        return linear_accuracy(self.net, len(self.data.classes), train, self.batches("val"), test)

    def through_method(self, before: float) -> Details:
        """Train, compress and measure; the domain is in the network then, as it is stored."""
        start, how = None, self.how
        own, first, _ = settings_of(how.method, None, None, how.options)
        done: list[Adapted] = []
        if "adapter" in own:
            kind = TRAINED_BY[str(own["adapter"])]
            start = "trained" if self.name != "trained" else "trained-a"
            done.append(self._adapt(start, kind, {"training": first}, None))
        done.append(self._adapt(self.name, how.method, how.given, start))
        last = done[-1]
        trained = self.net.domain(start) if start is not None else None
        moments = last.moments
        if how.method in FULL:
            self.reporter.stage("moments", "n, mean, covariance of A's input: for joining it later")
            moments = collect(self.net, self.name, self.batches("train", told=True) or [])
        as_trained = trained if trained is not None else self.net.domain(self.name)
        spectra = measure.spectra(as_trained, moments) if moments else {}
        stored = {"dtype": last.dtype or how.dtype, "storage": last.storage}
        if last.storage is None:
            stored["storage"] = storage_of(self.net, self.name, self.batches("val"))
        round_(self.net, self.name, PRECISIONS[str(stored["dtype"])])
        results, pictures = self._results(before, done, stored)
        facts = {
            "method": how.method,
            "settings": how.record(),
            "results": {**results, "spectra": spectra},
        }
        return Details(facts, moments, trained, pictures)

    def _adapt(self, name: str, method: str, options: Any, start: str | None) -> Adapted:
        done: Adapted = adapt(
            self.net,
            name,
            self.batches("train", shuffle=True),
            self.batches("val"),
            method,
            classes=list(self.data.classes) if start is None else None,
            start=start,
            statistics=self.batches("train"),
            test=self.batches(self.held_out),
            augment=self.how.augment,
            progress=self.reporter.training,
            snapshot=self.work / ("trained" if start is None and name != self.name else "domain"),
            seed=self.how.seed,
            **options,
        )
        self.net.domain(name).preprocessing = dict(self.inputs)
        return done

    def _results(
        self, before: float, done: list[Adapted], stored: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        how, part, classes = self.how, self.data.splits[self.held_out], self.data.classes
        dtype = PRECISIONS[stored["dtype"]]
        last, trained = done[-1], done[0].domain if len(done) > 1 else None
        self.reporter.stage(
            "measure", f"the stored domain on {len(part.y):,} {self.held_out} images"
        )
        found = probabilities(self.net, self.name, part.x)
        answers = found.argmax(1)
        said, pictures = measure.examples(part.x, part.y, found, classes)
        stages = {k: v for d in done for k, v in d.tested.items()}
        seconds = {k: v for d in reversed(done) for k, v in d.seconds.items()}
        results = {
            "on": self.held_out,
            "accuracy": {
                "before": before,
                "adapted": done[0].tested.get("train"),
                "compressed": stages.get("normalize"),
                "final": measure.percent(answers == part.y),
            },
            "validation": last.accuracy,
            "declined": last.declined,
            "forgetting": last.forgetting,
            "predicted": last.predicted,
            "whole": how.method == "covnorm" and _is_whole(self.net, self.name),
            "ranks": {site: _pair(rank) for site, rank in last.ranks.items()},
            "seconds": {**dict.fromkeys(STAGES, 0.0), **seconds},
            "confusion": measure.confusion(part.y, answers, len(classes)),
            "examples": said,
            **stored,
            "trained_bytes": trained and stored_bytes(self.net, trained, dtype),
            **measure.sizes(self.net, self.name, dtype),
        }
        return results, pictures


def _check(net: MultiDomainNetwork, name: str, how: How, data: Decoded) -> None:
    """Refuse before any training what would fail behind it."""
    own, _, _ = settings_of(how.method, None, None, how.options)
    check_for(net, [name], own)
    if own.get("max_drop") is not None and "val" not in data.splits:
        raise CovNormError(
            "max_drop (--max-drop) needs validation images, and there are too few to cut any: "
            "choose the ranks by variance or budget"
        )


def event(what: str, method: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a domain's history."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": what,
        "method": method,
        "accuracy": results["accuracy"]["final"],
        "stages": results["accuracy"],
        "parameters": results["counted"],
        "bytes": results["bytes"],
    }


def _is_whole(net: MultiDomainNetwork, name: str) -> bool:
    """Whether nothing was compressed: `max_drop` allowed nothing smaller."""
    return any(isinstance(A, FullMap) for A in net.domain(name).maps.values())


def _pair(rank: Any) -> list[int]:
    return list(rank) if isinstance(rank, tuple | list) else [rank, rank]


def _try_one(net: MultiDomainNetwork, data: Decoded, inputs: dict[str, Any], own: int) -> None:
    """Some networks take images of one size alone: said before any training."""
    image = next(iter(data.splits.values())).x[:1]
    if (error := _refusal(net, image, inputs)) is None:
        return
    other = _refusal(net, image.new_zeros(1, 3, own, own), {**inputs, "size": own})
    remedy = (
        f"its own size, {own} (--size {own})" if other is None else "the size it takes (--size)"
    )
    raise CovNormError(
        f"the backbone does not take images of {data.size} × {data.size} pixels ({error}): decode "
        f"them at {remedy}"
    )


@torch.no_grad()
def _refusal(
    net: MultiDomainNetwork, image: torch.Tensor, inputs: dict[str, Any]
) -> Exception | None:
    """What the backbone raises on an image; a network may raise anything."""
    device = next(net.backbone.parameters()).device
    try:
        net.eval().backbone(as_input(image, inputs).to(device))
    except Exception as error:
        return error
    return None


def _inputs(ecology: Ecology, data: Decoded) -> dict[str, Any]:
    """How images become inputs: the size of these data, the backbone's mean and std."""
    return {**ecology.backbone["preprocessing"], "size": data.size, "fit": data.fit}


def _absolute(source: Mapping[str, Any]) -> dict[str, Any]:
    """Later commands may be given in another folder."""
    return {
        **source,
        **({"path": str(Path(source["path"]).absolute())} if "path" in source else {}),
    }


def _balance(data: Decoded) -> dict[str, Any]:
    return {
        "digest": data.digest,
        "images": {split: len(part.y) for split, part in data.splits.items()},
        "balance": data.balance(),
        "unreadable": len(data.unreadable),
        "left_out": [list(pair) for pair in data.unreadable[:LISTED]],
        "duplicates": len(data.duplicates),
        "twice": [list(pair) for pair in data.duplicates[:LISTED]],
    }


def _history(ecology: Ecology, name: str) -> list[dict[str, Any]]:
    if name not in ecology.domains:
        return []
    try:
        history: list[dict[str, Any]] = ecology.details(name)["history"]
    except CovNormError:  # a damaged domain is healed by replacing it
        return []
    return history


def _with(details: Details, facts: dict[str, Any]) -> Details:
    return Details(facts, details.moments, details.trained, details.examples)
