"""`add`: from decoded images to a domain in the store, by any method; it resumes after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compress.collect import collect
from ..compress.covnorm import decompose_sites
from ..compress.precision import PRECISIONS, round_, storage_of, stored_bytes
from ..data.decode import Decoded
from ..data.loader import Batches, as_input
from ..errors import CovNormError
from ..methods.adapt import adapt
from ..methods.config import Config
from ..methods.recipes import METHODS
from ..methods.result import Adapted
from ..methods.settings import check_for
from ..network.network import MultiDomainNetwork
from ..training.probe import linear_accuracy
from ..training.progress import Reporter
from ..training.seeds import random_numbers_kept
from . import measure
from .config import TRAINED_BY, AddConfig, add_config
from .store import Details, Ecology
from .work import unfinished, workplace

FULL = set(TRAINED_BY.values())  # methods whose domains keep a full A
STAGES = ("train", "collect", "normalize", "tune")
LISTED = 1000  # files that a domain's details name at most


def add(
    ecology: Ecology,
    name: str,
    data: Decoded,
    config: AddConfig | None = None,
    *,
    source: Mapping[str, Any] | None = None,
    replace: bool = False,
    fresh: bool = False,
    backbone: nn.Module | None = None,
    device: str | torch.device = "cpu",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Adapt the ecology's backbone to decoded images and store the domain; return its details.

    Finished stages are kept inside the ecology. If the run is killed, the same call with the same
    settings continues where it was. The store changes at the very end, in one step.

    Args:
        config: from `add_config`; by default what `covnorm add` does without options.
        source: where the images came from, for later commands: "path", "seed".
        replace: allow an existing domain, which stays as it is until the end.
        fresh: discard the unfinished work of an earlier call.
        backbone: the caller's module, if the ecology was created with one.
    """
    config = config or add_config(validation="val" in data.splits)
    reporter = reporter or Reporter()
    if not replace:
        ecology.check_new(name)
    if METHODS[config.method].joint:
        raise CovNormError(
            f"method={config.method!r} is for several domains: add each by 'covnorm' or 'ra', then "
            "run covnorm join"
        )
    busy = f"{ecology.folder}: another process is adding domain {name!r}: wait until it is done"
    with workplace(ecology.workplace(name), busy, fresh) as work, random_numbers_kept():
        net = ecology.network(backbone).to(device)
        preprocessing = ecology.backbone["preprocessing"]
        inputs = {**preprocessing, "size": data.size, "fit": data.fit}
        check_for(net, [name], config.run)
        _check_validation(config.run, data)
        _check_size(net, data, inputs, preprocessing["size"])
        settings = {**config.record(), "domain": name, "data": data.digest}
        settings["backbone"] = ecology.backbone["fingerprint"]
        job = unfinished(work, settings)
        adding = _Adding(net, name, data, config, work, reporter, inputs)
        if "before" not in (known := job.load() or {}):
            reporter.stage("bare", "a linear head on the frozen network: what adapting must beat")
            known = {"before": adding.bare()}
            job.save(known)
        facts, kept = adding.adapt(known["before"])
        facts["source"] = {**_summary(data), **_absolute(source or {})}
        facts["history"] = [*_history(ecology, name), event("add", config.method, facts["results"])]
        reporter.stage("store", "write tensors, results and statistics into the ecology")
        dtype = PRECISIONS[facts["results"]["dtype"]]
        ecology.put(net, {name: Details(facts, **kept)}, dtype, replace)
    return facts


@dataclass
class _Adding:
    """One `add` in progress."""

    net: MultiDomainNetwork
    name: str
    data: Decoded
    config: AddConfig
    work: Path
    reporter: Reporter
    inputs: dict[str, Any]

    @property
    def held_out(self) -> str:
        return measure.held_out(self.data)

    def batches(self, split: str, shuffle: bool = False, shown: bool = False) -> Batches | None:
        if split not in self.data.splits:
            return None
        part, size = self.data.splits[split], self.config.batch if shuffle else 64
        progress = self.reporter.images if shown else None
        return Batches(part.x, part.y, self.inputs, size, shuffle, progress)

    def bare(self) -> float:
        train, test = self.batches("train", shown=True), self.batches(self.held_out)
        assert train is not None
        assert test is not None
        return linear_accuracy(self.net, len(self.data.classes), train, self.batches("val"), test)

    def adapt(self, before: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Train, compress and measure; return the domain's facts, and what is stored beside them.

        The domain is then in the network as it is stored.
        """
        config, start, results = self.config.run, None, []
        if "adapter" in config.options:
            start = "trained" if self.name != "trained" else "trained-a"
            training = config.training_of_A(TRAINED_BY[str(config.options["adapter"])])
            results.append(self._adapt(start, training, self.work / "trained"))
        results.append(self._adapt(self.name, config, self.work / "domain", start))
        last = results[-1]
        moments, parts = last.moments, last.parts
        if config.method in FULL:
            self.reporter.stage("moments", "n, mean, covariance of A's input, for joining later")
            moments = collect(self.net, self.name, self.batches("train", shown=True) or [])
            parts = decompose_sites(self.net, self.name, moments)
        last.dtype = last.dtype or self.config.dtype
        if last.storage is None:
            last.storage = storage_of(self.net, self.name, self.batches("val"))
        round_(self.net, self.name, PRECISIONS[last.dtype])
        found, examples = self._results(before, results)
        found["spectra"] = measure.spectra(parts or {})
        facts = {"method": config.method, "settings": self.config.record(), "results": found}
        trained = None if start is None else self.net.domain(start)
        return facts, {"moments": moments, "trained": trained, "examples": examples}

    def _adapt(
        self, name: str, config: Config, snapshot: Path, start: str | None = None
    ) -> Adapted:
        done: Adapted = adapt(
            self.net,
            name,
            self.batches("train", shuffle=True),
            self.batches("val"),
            config,
            classes=list(self.data.classes) if start is None else None,
            start=start,
            statistics=self.batches("train"),
            test=self.batches(self.held_out),
            augment=self.config.augment,
            progress=self.reporter.training,
            snapshot=snapshot,
        )
        self.net.domain(name).preprocessing = dict(self.inputs)
        return done

    def _results(
        self, before: float, results: list[Adapted]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        part, last = self.data.splits[self.held_out], results[-1]
        dtype = PRECISIONS[str(last.dtype)]
        trained = results[0].domain if len(results) > 1 else None
        self.reporter.stage(
            "measure", f"the stored domain on {len(part.y):,} {self.held_out} images"
        )
        measured, examples, final = measure.predictions(
            self.net, self.name, part, self.data.classes
        )
        tested = {stage: value for r in results for stage, value in r.tested.items()}
        seconds = {stage: value for r in reversed(results) for stage, value in r.seconds.items()}
        found = {
            "on": self.held_out,
            "accuracy": {
                "before": before,
                "adapted": results[0].tested.get("train"),
                "compressed": tested.get("normalize"),
                "final": final,
            },
            **last.record(),
            **measured,
            "seconds": {**dict.fromkeys(STAGES, 0.0), **seconds},
            "trained_bytes": trained and stored_bytes(self.net, trained, dtype),
            **measure.sizes(self.net, self.name, dtype),
        }
        return found, examples


def event(what: str, method: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of a domain's history."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": what,
        "method": method,
        "accuracy": results["accuracy"]["final"],
        "stages": results["accuracy"],
        "parameters": results["counted"],
        "bytes": results["bytes"],
    }


def _check_validation(config: Config, data: Decoded) -> None:
    if config.options.get("max_drop") is not None and "val" not in data.splits:
        raise CovNormError(
            "max_drop (--max-drop) needs validation images, and there are too few images to hold "
            "some out: choose the ranks with variance or budget"
        )


def _check_size(
    net: MultiDomainNetwork, data: Decoded, inputs: dict[str, Any], native: int
) -> None:
    """Check, before any training, that the network takes images of this size."""
    image = next(iter(data.splits.values())).x[:1]
    if (error := _refusal(net, image, inputs)) is None:
        return
    other = _refusal(net, image.new_zeros(1, 3, native, native), {**inputs, "size": native})
    remedy = (
        f"its native size, {native} (--size {native})"
        if other is None
        else "a size it takes (--size)"
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


def _absolute(source: Mapping[str, Any]) -> dict[str, Any]:
    """The source with an absolute path: later commands may run in another folder."""
    path = {"path": str(Path(source["path"]).absolute())} if "path" in source else {}
    return {**source, **path}


def _summary(data: Decoded) -> dict[str, Any]:
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
    except CovNormError:  # replacing a damaged domain heals it
        return []
    return history
