"""`add`: from decoded images to a domain in the store, by any method; it resumes after a kill."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compress.collect import collect
from ..compress.covnorm import decompose_sites
from ..compress.precision import PRECISIONS, stored_bytes
from ..data.decode import Decoded, merged, relabelled
from ..data.loader import Batches, as_input
from ..errors import CovNormError
from ..methods.adapt import adapt
from ..methods.recipes import METHODS
from ..methods.result import Adapted
from ..methods.settings import check_for
from ..network.network import MultiDomainNetwork
from ..training.probe import linear_accuracy
from ..training.progress import Reporter
from ..training.seeds import random_numbers_kept
from . import measure
from .config import TRAINED_BY, AddConfig, add_config
from .images import images_of
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
    update: bool = False,
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
        update: start from the A that the store keeps of this domain. The classes of the data must
            begin with the domain's; the head grows by the rest. See `more_images`.
        fresh: discard the unfinished work of an earlier call.
        backbone: the caller's module, if the ecology was created with one.
    """
    config = config or add_config(validation="val" in data.splits)
    reporter = reporter or Reporter()
    if not (replace or update):
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
        settings = {**config.record(), "domain": name, "data": data.digest, "update": update}
        settings["backbone"] = ecology.backbone["fingerprint"]
        job = unfinished(work, settings)
        inputs = {**ecology.backbone["preprocessing"], **data.preprocessing}
        loaders = measure.loaders(data, inputs, config.batch)
        if config.measured:
            loaders.pop("everything", None)
        images = data.splits["train"]
        watched = Batches(images.x, images.y, inputs, 64, progress=reporter.images)
        job.save({})
        reporter.stage("choose", "a linear head, what adapting must beat; then the settings")
        if update:
            _load_trained(ecology, net, name, data.classes)
        run: Adapted = adapt(
            net,
            name,
            method=config.run,
            further=update,
            classes=list(data.classes),
            augment=config.augment,
            snapshot=work / "domain",
            keep_trained=True,
            preprocessing=inputs,
            progress=reporter.training,
            **loaders,
        )
        if "linear" not in run.tested:  # the settings were given, so nothing needed a linear head
            reporter.stage("bare", "a linear head on the frozen network: what adapting must beat")
            held_out = loaders["val"], loaders["test"]
            run.tested["linear"] = linear_accuracy(net, len(data.classes), watched, *held_out)
        moments, parts, trained = run.moments, run.parts, None
        if config.run.method in FULL and not run.linear:
            reporter.stage("moments", "n, mean, covariance of A's input, for joining later")
            moments = collect(net, name, watched)
            parts = decompose_sites(net, name, moments)
        earlier = {
            "accuracy": {"before": run.tested["linear"], "adapted": run.tested.get("train")},
            "seconds": dict.fromkeys(STAGES, 0.0),
            "spectra": measure.spectra(parts or {}),
            "trained_bytes": None,
        }
        results, examples = measure.finish_(
            net, run, data, loaders["val"], config.dtype, earlier, reporter
        )
        dtype = PRECISIONS[results["dtype"]]
        if "adapter" in config.run.options:
            trained = run.trained
            results["trained_bytes"] = trained and stored_bytes(net, trained, dtype)
        origin = {"source": _source(data, source or {}), "history": _history(ecology, name)}
        what = "update" if update else "add"
        facts = measure.facts_after(what, config.record(), results, origin)
        reporter.stage("store", "write tensors, results and statistics into the ecology")
        details = {name: Details(facts, moments, trained, examples)}
        ecology.put(net, details, dtype, replace or update)
    return facts


def more_images(
    ecology: Ecology,
    name: str,
    path: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Decoded, dict[str, Any]]:
    """Return the images to update a domain with, and their source for `add`.

    These are the images that it was made from, if they are still there, and those of the path.
    Classes that the domain does not have come after its own.
    """
    entry, source = ecology.entry(name), ecology.details(name).get("source", {})
    if entry.basis is not None:
        raise CovNormError(
            f"domain {name!r} shares the basis {entry.basis!r}: add it again with all images "
            "(--replace), then join it"
        )
    new = images_of(ecology, name, path, progress)
    try:
        old = images_of(ecology, name, None, progress)
    except CovNormError as error:
        own = tuple(ecology.record(name)["classes"])
        classes = (*own, *(c for c in new.classes if c not in own))
        note = f"trained with the new images only ({error})"
        data = replaced(relabelled(new, classes), notes=(*new.notes, note))
        return data, {"path": str(path), "seed": source.get("seed", 0)}
    more = [*source.get("more", ()), str(Path(path).absolute())]
    return merged(old, new), {"path": source["path"], "seed": source.get("seed", 0), "more": more}


@torch.no_grad()
def _load_trained(
    ecology: Ecology, net: MultiDomainNetwork, name: str, classes: tuple[str, ...]
) -> None:
    """Load a domain with its full A, and give its head a row for every further class.

    New rows are 0 with the smallest bias, so the answers do not change before training.
    """
    entry = ecology.entry(name)
    trained = "trained.record" in entry.blobs
    if not trained and entry.method not in FULL:
        raise CovNormError(
            f"domain {name!r} has no stored A to continue from (method {entry.method!r}): add it "
            "again with all images (--replace)"
        )
    domain = ecology.load(net, name, trained=trained)
    own = tuple(domain.classes or ())
    if classes[: len(own)] != own:
        raise CovNormError(f"domain {name!r} has other classes than these images: {own[:3]} …")
    old, domain.classes = domain.head, classes
    if len(classes) > len(own) and isinstance(old, nn.Linear):
        head = nn.Linear(old.in_features, len(classes), device=old.weight.device)
        head.weight[: len(own)], head.weight[len(own) :] = old.weight, 0.0
        head.bias[: len(own)], head.bias[len(own) :] = old.bias, old.bias.min()
        domain.head = head
    elif len(classes) > len(own):
        raise CovNormError(
            f"domain {name!r}: only a linear head can grow, and this backbone's is a "
            f"{type(old).__name__}: add the domain again with all images (--replace)"
        )


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
