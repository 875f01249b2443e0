"""`add`: from decoded images to a domain in the store, by any method; it resumes after a kill."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compress.collect import collect
from ..compress.covnorm import decompose_sites
from ..compress.precision import PRECISIONS, stored_bytes
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
    if METHODS[config.run.method].joint:
        raise CovNormError(
            f"method={config.run.method!r} is for several domains: add each by 'covnorm' or 'ra', "
            "then run covnorm join"
        )
    if config.run.options.get("max_drop") is not None and "val" not in data.splits:
        raise CovNormError(
            "max_drop (--max-drop) needs validation images, and there are too few images to hold "
            "some out: choose the ranks with variance or budget"
        )
    busy = f"{ecology.folder}: another process is adding domain {name!r}: wait until it is done"
    with workplace(ecology.workplace(name), busy, fresh) as work, random_numbers_kept():
        net = ecology.network(backbone).to(device)
        check_for(net, [name], config.run)
        _check_size(net, data, ecology.backbone["preprocessing"])
        settings = {**config.record(), "domain": name, "data": data.digest}
        settings["backbone"] = ecology.backbone["fingerprint"]
        job = unfinished(work, settings)
        inputs = {**ecology.backbone["preprocessing"], "size": data.size, "fit": data.fit}
        loaders = measure.loaders(data, inputs, config.batch)
        images = data.splits["train"]
        watched = Batches(images.x, images.y, inputs, 64, progress=reporter.images)
        if "before" not in (known := job.load() or {}):
            reporter.stage("bare", "a linear head on the frozen network: what adapting must beat")
            held_out = loaders["val"], loaders["test"]
            known = {"before": linear_accuracy(net, len(data.classes), watched, *held_out)}
            job.save(known)
        runs = _adapt(net, name, data, config, work, progress=reporter.training, **loaders)
        last = runs[-1]
        moments, parts = last.moments, last.parts
        if config.run.method in FULL:
            reporter.stage("moments", "n, mean, covariance of A's input, for joining later")
            moments = collect(net, name, watched)
            parts = decompose_sites(net, name, moments)
        earlier = {
            "accuracy": {"before": known["before"], "adapted": runs[0].tested.get("train")},
            "seconds": {**dict.fromkeys(STAGES, 0.0), **runs[0].seconds},
            "spectra": measure.spectra(parts or {}),
            "trained_bytes": None,
        }
        results, examples = measure.finish_(
            net, last, data, loaders["val"], config.dtype, earlier, reporter
        )
        dtype, trained = PRECISIONS[results["dtype"]], None
        if len(runs) > 1:
            trained = net.domain(runs[0].domain)
            results["trained_bytes"] = stored_bytes(net, runs[0].domain, dtype)
        origin = {"source": _source(data, source or {}), "history": _history(ecology, name)}
        facts = measure.facts_after("add", config.record(), results, origin)
        reporter.stage("store", "write tensors, results and statistics into the ecology")
        ecology.put(net, {name: Details(facts, moments, trained, examples)}, dtype, replace)
    return facts


def _adapt(
    net: MultiDomainNetwork, name: str, data: Decoded, config: AddConfig, work: Path, **shared: Any
) -> list[Adapted]:
    """Train A, if the method starts from a trained one, then adapt; return the runs in order."""
    run, runs = config.run, []
    steps: list[tuple[str, Config, str | None]] = [(name, run, None)]
    if "adapter" in run.options:
        start = "trained" if name != "trained" else "trained-a"
        training = run.training_of_A(TRAINED_BY[str(run.options["adapter"])])
        steps = [(start, training, None), (name, run, start)]
    for domain, settings, from_ in steps:
        done: Adapted = adapt(
            net,
            domain,
            method=settings,
            classes=list(data.classes) if from_ is None else None,
            start=from_,
            augment=config.augment,
            snapshot=work / ("domain" if domain == name else "trained"),
            **shared,
        )
        net.domain(domain).preprocessing = dict(shared["train"].preprocessing)
        runs.append(done)
    return runs


@torch.no_grad()
def _check_size(net: MultiDomainNetwork, data: Decoded, preprocessing: dict[str, Any]) -> None:
    """Check, before any training, that the network takes images of this size."""
    native, device = preprocessing["size"], next(net.backbone.parameters()).device
    refused: dict[int, Exception] = {}
    for size in (data.size, native):
        image = torch.zeros(1, 3, size, size, dtype=torch.uint8)
        try:
            net.eval().backbone(as_input(image, preprocessing).to(device))
        except Exception as error:  # a network may raise anything
            refused[size] = error
        else:
            break
    if data.size in refused:
        other = "a size it takes (--size)"
        remedy = other if native in refused else f"its native size, {native} (--size {native})"
        raise CovNormError(
            f"the backbone does not take images of {data.size} × {data.size} pixels "
            f"({refused[data.size]}): decode them at {remedy}"
        )


def _source(data: Decoded, source: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the images. Their path becomes absolute: later commands may run elsewhere."""
    path = {"path": str(Path(source["path"]).absolute())} if "path" in source else {}
    return {
        "digest": data.digest,
        "images": {split: len(part.y) for split, part in data.splits.items()},
        "balance": data.balance(),
        "unreadable": len(data.unreadable),
        "left_out": [list(pair) for pair in data.unreadable[:LISTED]],
        "duplicates": len(data.duplicates),
        "twice": [list(pair) for pair in data.duplicates[:LISTED]],
        **source,
        **path,
    }


def _history(ecology: Ecology, name: str) -> list[dict[str, Any]]:
    with contextlib.suppress(CovNormError):  # a new domain, or a damaged one that is replaced
        return list(ecology.details(name).get("history", ()))
    return []
