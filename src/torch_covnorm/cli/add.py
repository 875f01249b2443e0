"""`init`, `add`, `join`: the commands that build an ecology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.decode import Decoded
from ..data.source import Source, read_source
from ..ecology import Ecology
from ..ecology.add import add as add_domain
from ..ecology.add import more_images
from ..ecology.config import BATCH, AddConfig, add_config
from ..ecology.images import decode_for, images_of
from ..ecology.join import METHOD as JOINT
from ..ecology.join import join as join_domains
from ..ecology.manifest import KEEP
from ..errors import CovNormError
from ..methods.recipes import METHODS
from ..report.wording import size
from ..training.augment import Augment
from .inspect import summary
from .options import Compute, Output, Seed, domain_names, pairs, panel, run_option
from .screen import Screen, table

ranks, training, inputs = panel("Ranks"), panel("Training"), panel("Images")
stored = panel("Stored file")
SINGLE = [name for name, method in METHODS.items() if not method.joint]  # of one domain
NORMS_HELP = "BatchNorms that the domain copies: shared (none), sites or own (all)."
SETTINGS_HELP = "Any other setting of the method or its training."


@dataclass(frozen=True)
class Adapting(Compute):
    """The options of `add` and `join`."""

    variance: Annotated[
        float | None, ranks("Keep this share of the variance at every layer (the paper: 0.99).")
    ] = None
    epochs: Annotated[
        int | None,
        training("Epochs of training; tuning takes half as many. Default: by the images.", min=0),
    ] = None
    lr: Annotated[float | None, training("Learning rate. Default: chosen on validation.")] = None
    norms: Annotated[str | None, training(NORMS_HELP)] = None
    batch: Annotated[int, training("Images per training step.", min=2)] = BATCH
    settings: Annotated[list[str] | None, training(SETTINGS_HELP, "--set", metavar="KEY=VALUE")] = (
        None
    )
    fresh: Annotated[bool, run_option("Discard unfinished work and start over.", "--fresh")] = False
    seed: Seed = 0

    def options(self, **others: Any) -> dict[str, Any]:
        """Return the options of the method and its training that were given, --set included."""
        given = {key: getattr(self, key) for key in ("variance", "epochs", "lr", "norms")} | others
        chosen = {key: value for key, value in given.items() if value is not None}
        return chosen | pairs(self.settings or [])


def init(
    folder: Annotated[Path, typer.Argument(metavar="ECOLOGY", help="Folder to create.")],
    backbone: Annotated[
        str,
        typer.Option(
            help="efficientnet-lite0, mobilenet-v2, vgg16, resnet26, a timm name, "
            "hf-hub:user/model, a file of weights, or file.py:function for a network of yours."
        ),
    ] = "efficientnet-lite0",
    weights: Annotated[
        str | None,
        typer.Option(help="Weights file for a backbone given by name or function, or 'random'."),
    ] = None,
    keep: Annotated[
        int, typer.Option(min=0, help="Earlier versions to keep of every domain, for rollback.")
    ] = KEEP,
    *,
    common: Output,
) -> None:
    """Create an ecology: a folder for one frozen backbone and its domains.

    covnorm init house

    covnorm init house --backbone vgg16 --weights vgg16.safetensors

    covnorm init house --backbone nets.py:my_network --weights trained.pth
    """
    ecology = Ecology.create(folder, backbone, weights, keep=keep)
    record, matched = ecology.backbone, ecology.matched
    common.screen.result(
        {"ecology": str(folder), "backbone": record, "matched": matched and matched.record()},
        f"{folder}: {record['name']}, {record['parameters']:,} parameters, {size(record['bytes'])}",
        *([f"{weights or backbone}: {matched}"] if matched else []),
        f"next: covnorm add NAME IMAGES --ecology {folder}",
    )


def add(
    name: Annotated[str, typer.Argument(metavar="DOMAIN", help="Name of the new domain.")],
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="Folder, .csv or .npz file.")],
    method: Annotated[str, training(f"One of: {', '.join(SINGLE)}.")] = "covnorm",
    budget: Annotated[
        float | None, ranks("Adapter parameters as a share of the backbone's, for example 0.01.")
    ] = None,
    max_drop: Annotated[
        float | None,
        ranks("Find the smallest file that loses at most N points. Default rule, with 0.5."),
    ] = None,
    metric: Annotated[
        str | None, ranks("Rank by variance or loss. Default: loss with --max-drop, else variance.")
    ] = None,
    flip: Annotated[bool, training("Also train on mirrored images.", "--flip")] = False,
    shift: Annotated[int, training("Also train on images shifted by up to N pixels.", min=0)] = 0,
    pixels: Annotated[
        int | None, inputs("Side of the input in pixels. Default: by the images.", "--size", min=8)
    ] = None,
    fit: Annotated[
        str,
        inputs(
            "squash: use the whole image; crop: use its central square; letterbox: keep its shape "
            "and pad it."
        ),
    ] = "squash",
    background: Annotated[
        str,
        inputs(
            "Color below transparent pixels and around a letterbox: white, gray, black, #rrggbb, "
            "or none to ignore transparency."
        ),
    ] = "white",
    strict: Annotated[bool, inputs("Stop at the first unreadable image.", "--strict")] = False,
    limit: Annotated[
        float, inputs("Share of the images that may be unreadable.", min=0, max=1)
    ] = 0.05,
    dtype: Annotated[
        str | None,
        stored("float32, float16, int8 or smallest (the default with --max-drop; else float16)."),
    ] = None,
    replace: Annotated[bool, stored("Replace an existing domain.", "--replace")] = False,
    update: Annotated[
        bool, stored("Train an existing domain further, with these images too.", "--update")
    ] = False,
    *,
    common: Adapting,
) -> None:
    """Adapt the backbone to labeled images and store the result as a domain.

    IMAGES is a folder with one subfolder per class (or train/, val/ and test/ folders of such), a
    .csv with path,label[,split], or an .npz with x_train, y_train, …

    covnorm add flowers photos/

    covnorm add flowers photos/ --budget 0.01        adapters of 1 % of the backbone

    covnorm add defects parts.csv --max-drop 2       the smallest file that loses at most two points

    covnorm add digits digits.npz --method bn        another method of the paper

    covnorm add flowers more/ --update               more images, or more classes, of a domain

    If it is killed or interrupted, run the same command again to resume.
    """
    screen, ecology = common.screen, common.ecology
    if update:
        method = _method_of(ecology, name)
    elif not replace:
        ecology.check_new(name)
    if budget is not None and not 0 < budget < 1:
        raise CovNormError(f"--budget {budget}: expected a share between 0 and 1")
    parameters = None if budget is None else int(budget * ecology.backbone["parameters"])
    source = read_source(images, seed=common.seed)
    config = add_config(
        method,
        common.options(budget=parameters, max_drop=max_drop, metric=metric),
        batch=common.batch,
        augment=Augment(padding=shift, fill="reflect", flip=0.5 * flip) if flip or shift else None,
        dtype=dtype,
        seed=common.seed,
        validation="val" in source.splits,
    )
    decoding: dict[str, Any] = {"size": pixels, "fit": fit, "background": background}
    decoding |= {"strict": strict, "limit": limit}
    storing: dict[str, Any] = {"fresh": common.fresh, "device": common.device}
    if update:
        facts = _update(screen, ecology, name, images, config, **storing)
        screen.result(_add_result(ecology, name, facts), *summary(ecology, name, facts))
        return
    storing["replace"] = replace
    facts = add_source(screen, ecology, name, source, config, decoding, **storing)
    screen.result(_add_result(ecology, name, facts), *summary(ecology, name, facts))


def _method_of(ecology: Ecology, name: str) -> str:
    """Return the method that made a domain, to update it by the same one."""
    method = ecology.entry(name).method
    if method not in SINGLE:
        raise CovNormError(
            f"domain {name!r} was made by {method!r}, which --update does not know: add it again "
            "with all images (--replace)"
        )
    return method


def _update(
    screen: Screen,
    ecology: Ecology,
    name: str,
    images: Path,
    config: AddConfig,
    **storing: Any,
) -> dict[str, Any]:
    """Train a domain further with more images; return its details."""
    known = set(ecology.record(name)["classes"] or ())
    with screen.reporting() as reporter:
        reporter.stage("decode", "the new images, and those that the domain was made from")
        data, source = more_images(ecology, name, images, reporter.images)
        for line in _lines_about(data):
            screen.info(f"          {line}")
        if new := [c for c in data.classes if c not in known]:
            screen.info(f"          new classes: {', '.join(new)}")
        return add_domain(
            ecology, name, data, config, source=source, update=True, reporter=reporter, **storing
        )


def add_source(
    screen: Screen,
    ecology: Ecology,
    name: str,
    source: Source,
    config: AddConfig,
    decoding: Mapping[str, Any],
    **storing: Any,
) -> dict[str, Any]:
    """Decode images, show what they are, and add them as a domain; return its details.

    decoding: arguments of `decode_for`. storing: arguments of the library's `add`.
    """
    parts = ", ".join(f"{len(items):,} {split}" for split, items in source.splits.items())
    for note in source.notes:
        screen.info(f"note: {note}")
    screen.info(f"{source.path}: {len(source.classes):,} classes; {parts}")
    count = sum(map(len, source.splits.values()))
    where = {"path": str(source.path), "seed": config.run.training.seed}
    with screen.reporting() as reporter:
        reporter.stage("decode", f"{count:,} images, once; kept in the ecology's cache")
        data = decode_for(ecology, source, **decoding, progress=reporter.images)
        for line in _lines_about(data):
            screen.info(f"          {line}")
        return add_domain(ecology, name, data, config, source=where, reporter=reporter, **storing)


def _lines_about(data: Decoded) -> Iterator[str]:
    for note in data.notes:
        yield f"note: {note}"
    counts = sorted(data.balance()["train"].items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{c}: {n}" for c, n in counts[:6]) + (", …" if len(counts) > 6 else "")
    yield f"training images per class: {shown} (fewest: {counts[-1][1]})"
    for file, reason in data.unreadable[:5]:
        yield f"left out: {file}: {reason}"
    if len(data.unreadable) > 5:
        yield f"left out: {len(data.unreadable) - 5} more"
    if data.duplicates:
        first, second = data.duplicates[0][:2]
        yield (
            f"note: {len(data.duplicates)} images are in two splits, for example {first} = "
            f"{second}. The measured accuracy may be too high."
        )
    yield f"input size: {data.size} × {data.size} pixels ({data.fit}; background {data.background})"


def _add_result(ecology: Ecology, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `add --json` prints."""
    results, entry = facts["results"], ecology.entry(name)
    return {
        "domain": name,
        "method": facts["method"],
        "accuracy": results["accuracy"],
        "on": results["on"],
        "parameters": {
            "adapter": entry.parameters,
            "total": entry.total,
            "backbone": ecology.backbone["parameters"],
        },
        "bytes": entry.bytes,
        "dtype": results["dtype"],
        "declined": results["declined"],
        "linear": results["linear"],
        "choices": results["choices"],
        "unreadable": facts["source"]["left_out"],
        "duplicates": facts["source"]["twice"],
        "ranks": results["ranks"],
        "seconds": {k: round(v, 3) for k, v in results["seconds"].items()},
    }


def join(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOMAIN…",
            autocompletion=domain_names,
            help="Default: every domain that has a trained A and shares no basis yet.",
        ),
    ] = None,
    basis: Annotated[str, stored("Name of the shared basis.")] = "joint",
    dtype: Annotated[str, stored("float32, float16 or int8.")] = "float16",
    *,
    common: Adapting,
) -> None:
    """Let domains share one C and W, so that each further domain adds only a small M.

    covnorm join

    covnorm join flowers birds --variance 0.9

    If it is killed or interrupted, run the same command again to resume.
    """
    screen, ecology = common.screen, common.ecology
    options = common.options(basis=basis)
    config = add_config(JOINT, options, batch=common.batch, dtype=dtype, seed=common.seed)
    with screen.reporting(named=True) as reporter:
        done = join_domains(
            ecology,
            names or [],
            partial(images_of, ecology, progress=reporter.images),
            config,
            fresh=common.fresh,
            device=common.device,
            reporter=reporter,
        )
    value = [_add_result(ecology, n, facts) for n, facts in done.items()]
    rows = [
        (r["domain"], r["accuracy"]["final"], r["parameters"]["adapter"], size(r["bytes"]))
        for r in value
    ]
    columns = ("domain", "accuracy %", "adapter parameters", "file")
    shared = next(iter(done.values()))["results"]["parameters"].get("shared", 0)
    sharers = sum(entry.basis == basis for entry in ecology.domains.values())
    screen.result(
        {"basis": basis, "shared": shared, "domains": value},
        table("", columns, rows),
        f"basis {basis!r}: {shared:,} parameters, shared by {sharers} domain{'s' * (sharers > 1)}",
    )
