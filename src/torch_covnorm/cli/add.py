"""`init`, `add`, `join`: the commands that build an ecology."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..compress.precision import SMALLEST
from ..data.decode import Decoded
from ..data.images import Augment
from ..data.source import Source, read_source
from ..ecology import Ecology
from ..ecology.add import How
from ..ecology.add import add as add_domain
from ..ecology.images import decode_for, images_of
from ..ecology.join import METHOD as JOINT
from ..ecology.join import join as join_domains
from ..errors import CovNormError
from ..methods.recipes import METHODS
from .options import (
    Compute,
    Json,
    Quiet,
    Seed,
    check_device,
    domain_names,
    pairs,
    panel,
    run_option,
)
from .screen import Screen, size, table
from .summary import add_result, summary

ranks, training, inputs = panel("Ranks"), panel("Training"), panel("Images")
stored = panel("Stored file")

Epochs = Annotated[int | None, training(min=0, help="Epochs of training A. Default: 10.")]
Rate = Annotated[
    float | None, training("--lr", help="Peak learning rate. Default: depends on the method.")
]
Norms = Annotated[
    str,
    training(
        help="BatchNorm statistics while training: frozen, or batch, which needs many images. "
        "Method bn always uses batch."
    ),
]
Batch = Annotated[int, training(min=2, help="Images per training step.")]
Settings = Annotated[
    list[str] | None,
    training(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting of the method or its training. Repeat for several.",
    ),
]
Variance = Annotated[
    float | None, ranks(help="Keep this share of the variance at every layer (the paper: 0.99).")
]
Fresh = Annotated[bool, run_option("--fresh", help="Discard unfinished work and start over.")]


RULES = {"variance", "budget", "max_drop", "ranks", "preset", "M"}  # none: the default one
MAX_DROP = 0.5  # points of validation accuracy, where no rule is given
METRIC = "loss"  # with max_drop, where none is given: the smaller files (docs/results.md)


def init(
    folder: Annotated[Path, typer.Argument(metavar="ECOLOGY", help="Folder to create.")],
    backbone: Annotated[
        str,
        typer.Option(
            help="efficientnet-lite0, vgg16, resnet26, the name of a timm model, or a weights file."
        ),
    ] = "efficientnet-lite0",
    weights: Annotated[
        str | None, typer.Option(help="Weights file for a backbone given by name, or 'random'.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create an ecology: a folder for one frozen backbone and its domains.

    covnorm init house

    covnorm init house --backbone vgg16 --weights vgg16.safetensors
    """
    screen = Screen(json, quiet)
    made = Ecology.create(folder, backbone, weights).backbone
    value = {"ecology": str(folder), "backbone": made}
    screen.result(
        value,
        f"{folder}: {made['name']}, {made['parameters']:,} parameters, {size(made['bytes'])}",
        f"next: covnorm add NAME IMAGES --ecology {folder}",
    )


def add(
    name: Annotated[str, typer.Argument(metavar="DOMAIN", help="Name of the new domain.")],
    images: Annotated[
        Path,
        typer.Argument(
            metavar="IMAGES",
            help="A folder with one subfolder per class (or train/, val/ and test/ folders of "
            "such), a .csv of path,label[,split], or an .npz with x_train, y_train, …",
        ),
    ],
    method: Annotated[str, training(help=f"One of: {', '.join(METHODS)}.")] = "covnorm",
    variance: Variance = None,
    budget: Annotated[
        float | None,
        ranks(help="Adapter parameters as a share of the backbone's, for example 0.01."),
    ] = None,
    max_drop: Annotated[
        float | None,
        ranks(
            help="Choose the smallest file that loses at most this many points of validation "
            "accuracy. Default rule, with 0.5."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        ranks(
            help="What decides which directions to keep: variance (the paper), or loss, their "
            "effect on the loss. Default: loss with --max-drop, else variance."
        ),
    ] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    norms: Norms = "frozen",
    batch: Batch = 32,
    flip: Annotated[bool, training("--flip", help="Also train on mirrored images.")] = False,
    shift: Annotated[
        int, training(min=0, help="Also train on images shifted by up to this many pixels.")
    ] = 0,
    settings: Settings = None,
    pixels: Annotated[
        int | None,
        inputs(
            "--size", min=8, help="Side of the network's input in pixels. Default: by the images."
        ),
    ] = None,
    fit: Annotated[
        str, inputs(help="squash: use the whole image; crop: use its central square.")
    ] = "squash",
    strict: Annotated[bool, inputs("--strict", help="Stop at the first unreadable image.")] = False,
    limit: Annotated[
        float, inputs(min=0, max=1, help="Share of the images that may be unreadable.")
    ] = 0.05,
    dtype: Annotated[
        str | None,
        stored(
            help="Precision of the stored numbers: float32, float16, int8, or smallest, the one "
            "with the smallest file within --max-drop. Default: smallest with --max-drop, else "
            "float16."
        ),
    ] = None,
    replace: Annotated[
        bool, stored("--replace", help="Replace the domain if it already exists.")
    ] = False,
    fresh: Fresh = False,
    seed: Seed = 0,
    *,
    common: Compute,
) -> None:
    """Adapt the backbone to labelled images and store the result as a domain.

    covnorm add flowers photos/

    covnorm add flowers photos/ --budget 0.01        adapters of 1 % of the backbone

    covnorm add defects parts.csv --max-drop 2       the smallest file that loses two points

    covnorm add digits digits.npz --method bn        another method of the paper

    If it is killed or interrupted, run the same command again to resume.
    """
    screen, ecology, device = common.screen, common.ecology, common.device
    if not replace:
        ecology.check_new(name)
    given: dict[str, Any] = {"variance": variance, "max_drop": max_drop, "epochs": epochs, "lr": lr}
    given["metric"] = metric
    given["norms"] = "batch" if method == "bn" else norms
    options = {k: v for k, v in given.items() if v is not None}
    if budget is not None:
        if not 0 < budget < 1:
            raise CovNormError(f"--budget {budget}: a share of the backbone between 0 and 1")
        options["budget"] = int(budget * ecology.backbone["parameters"])
    options |= pairs(settings or [])
    augment = Augment(padding=shift, fill="reflect", flip=0.5 * flip) if flip or shift else None
    by_default = method == "covnorm" and not RULES & set(options)
    rule: dict[str, Any] = {"max_drop": MAX_DROP} if by_default else {}
    if promised := "max_drop" in {**options, **rule}:
        rule |= {"metric": METRIC} if "metric" not in options else {}
    chosen = dtype or (SMALLEST if promised else "float16")
    how = How(method, {**options, **rule}, batch, augment, chosen, seed)
    device = check_device(device)
    source = read_source(images, seed=seed)
    _show_source(screen, source)
    if by_default and "val" not in source.splits:
        rule = {"variance": 0.99}
        how = dataclasses.replace(how, options={**options, **rule}, dtype=dtype or "float16")
    with screen.reporting() as reporter:
        reporter.stage("decode", f"{_count(source):,} images, once; kept in the ecology's cache")
        data = decode_for(
            ecology, source, pixels, fit, strict=strict, limit=limit, progress=reporter.images
        )
        _show_data(screen, data)
        facts = add_domain(
            ecology,
            name,
            data,
            how,
            source={"path": str(images.absolute()), "seed": seed},
            replace=replace,
            fresh=fresh,
            device=device,
            reporter=reporter,
        )
    screen.result(add_result(ecology, name, facts), *summary(ecology, name, facts))


def join(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOMAIN…",
            autocompletion=domain_names,
            help="Default: every domain that has a trained A and shares no basis yet.",
        ),
    ] = None,
    variance: Variance = None,
    epochs: Epochs = None,
    lr: Rate = None,
    norms: Norms = "frozen",
    batch: Batch = 32,
    settings: Settings = None,
    basis: Annotated[str, stored(help="Name of the shared basis.")] = "joint",
    dtype: Annotated[
        str, stored(help="Precision of the stored numbers: float32, float16 or int8.")
    ] = "float16",
    fresh: Fresh = False,
    seed: Seed = 0,
    *,
    common: Compute,
) -> None:
    """Let domains share one C and W, so that each further domain adds only a small M.

    covnorm join

    covnorm join flowers birds --variance 0.9

    If it is killed or interrupted, run the same command again to resume.
    """
    screen, ecology, device = common.screen, common.ecology, common.device
    given = {"variance": variance, "epochs": epochs, "lr": lr, "norms": norms}
    options = {k: v for k, v in given.items() if v is not None}
    how = How(JOINT, {**options, "basis": basis, **pairs(settings or [])}, batch, None, dtype, seed)
    with screen.reporting(named=True) as reporter:
        done = join_domains(
            ecology,
            names or [],
            lambda n: images_of(ecology, n, progress=reporter.images),
            how,
            fresh=fresh,
            device=check_device(device),
            reporter=reporter,
        )
    value = [add_result(ecology, n, facts) for n, facts in done.items()]
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


def _count(source: Source) -> int:
    return sum(len(items) for items in source.splits.values())


def _show_source(screen: Screen, source: Source) -> None:
    for note in source.notes:
        screen.info(f"note: {note}")
    parts = ", ".join(f"{len(items):,} {split}" for split, items in source.splits.items())
    screen.info(f"{source.path}: {len(source.classes):,} classes; {parts}")


def _show_data(screen: Screen, data: Decoded) -> None:
    counts = sorted(data.balance()["train"].items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{c} {n}" for c, n in counts[:6]) + (", …" if len(counts) > 6 else "")
    lines = [f"note: {note}" for note in data.notes]
    lines += [f"training images per class: {shown} (fewest: {counts[-1][1]})"]
    lines += [f"left out: {file}: {reason}" for file, reason in data.unreadable[:5]]
    if len(data.unreadable) > 5:
        lines.append(f"left out: {len(data.unreadable) - 5} more")
    if data.duplicates:
        first, second = data.duplicates[0][:2]
        lines.append(
            f"note: {len(data.duplicates)} images are in two splits, for example {first} = "
            f"{second}. The measured accuracy may be too high."
        )
    lines.append(f"input size: {data.size} × {data.size} pixels ({data.fit})")
    for line in lines:
        screen.info(f"          {line}")
