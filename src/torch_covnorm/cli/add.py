"""`init`, `add`, `join`: what puts something into an ecology."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.decode import Decoded
from ..data.images import Augment
from ..data.source import Source, read_source
from ..ecology import Ecology
from ..ecology.add import add as add_domain
from ..ecology.config import BATCH, add_config
from ..ecology.images import decode_for, images_of
from ..ecology.join import METHOD as JOINT
from ..ecology.join import join as join_domains
from ..errors import CovNormError
from ..methods.recipes import METHODS
from .options import (
    Device,
    Json,
    Quiet,
    Seed,
    Threads,
    Where,
    check_device,
    find,
    pairs,
    set_threads,
)
from .screen import Screen, size, table
from .summary import added, stages_table

Epochs = Annotated[int | None, typer.Option(min=0, help="Of training A.", show_default=False)]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate.", show_default=False)]
Norms = Annotated[
    str | None,
    typer.Option(
        help="Statistics of the backbone's BatchNorms: frozen (the default), or of each batch, "
        "which needs many images (the default of method bn).",
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option(min=2, help="Images a step.")]
Dtype = Annotated[str, typer.Option(help="Of the stored numbers: float32, float16 or int8.")]
Chosen = Annotated[
    str | None,
    typer.Option(
        help="Of the stored numbers: float32, float16, int8, or smallest: whichever makes the "
        "smallest file within --max-drop. The default with it; else float16.",
        show_default=False,
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget unfinished work; begin anew.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any other setting of the method or its training."
    ),
]
Variance = Annotated[
    float | None,
    typer.Option(
        help="Ranks: the share of variance to keep (the paper: 0.99).", show_default=False
    ),
]


def init(
    folder: Annotated[Path, typer.Argument(metavar="ECOLOGY", show_default=False)],
    backbone: Annotated[
        str, typer.Option(help="efficientnet-lite0, vgg16, resnet26, a timm name, or a file.")
    ] = "efficientnet-lite0",
    weights: Annotated[
        str | None, typer.Option(help="A file of weights, or 'random'.", show_default=False)
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make an ecology: a folder for one frozen backbone and its domains.

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
    name: Annotated[str, typer.Argument(metavar="DOMAIN", show_default=False)],
    images: Annotated[Path, typer.Argument(metavar="FOLDER|CSV|NPZ", show_default=False)],
    method: Annotated[str, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = "covnorm",
    variance: Variance = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Ranks: adapters of at most this share of the backbone, such as 0.01.",
            show_default=False,
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Ranks and dtype: the smallest file that loses at most so many points of "
            "validation accuracy. The default, with 0.5.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What a direction is worth: its variance (the paper), or the loss that it moves; "
            "the loss with --max-drop, else the variance.",
            show_default=False,
        ),
    ] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    norms: Norms = None,
    batch: Batch = BATCH,
    pixels: Annotated[
        int | None,
        typer.Option(
            "--size", min=8, help="Side of the inputs; else by the images.", show_default=False
        ),
    ] = None,
    fit: Annotated[str, typer.Option(help="squash: the whole image; crop: its middle.")] = "squash",
    flip: Annotated[bool, typer.Option("--flip", help="Train on mirrored images too.")] = False,
    shift: Annotated[int, typer.Option(min=0, help="Train on images shifted so far.")] = 0,
    dtype: Chosen = None,
    settings: Settings = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at an unreadable image.")] = False,
    limit: Annotated[
        float, typer.Option(min=0, max=1, help="The share of images that may be unreadable.")
    ] = 0.05,
    replace: Annotated[bool, typer.Option("--replace", help="It may be there already.")] = False,
    fresh: Fresh = False,
    where: Where = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Adapt the backbone to labelled images and keep the result as a domain.

    IMAGES is a folder with one folder a class (or train/, val/, test/ of such), a .csv of
    path,label[,split], or an .npz with x_train, y_train, …

    covnorm add flowers photos/

    covnorm add flowers photos/ --budget 0.01        adapters of 1 % of the backbone

    covnorm add defects parts.csv --max-drop 2       the smallest file that loses two points

    covnorm add digits digits.npz --method bn        another method of the paper

    Killed or interrupted, the same command goes on from where it was.
    """
    screen, ecology = Screen(json, quiet), find(where)
    set_threads(threads)
    if not replace:
        ecology.check_new(name)
    options = given(
        variance=variance, max_drop=max_drop, metric=metric, epochs=epochs, lr=lr, norms=norms
    )
    if budget is not None:
        if not 0 < budget < 1:
            raise CovNormError(f"--budget {budget}: a share of the backbone between 0 and 1")
        options["budget"] = int(budget * ecology.backbone["parameters"])
    options |= pairs(settings or [])
    augment = Augment(padding=shift, fill="reflect", flip=0.5 * flip) if flip or shift else None
    device = check_device(device)
    source = read_source(images, seed=seed)
    config = add_config(
        method,
        options,
        batch=batch,
        augment=augment,
        dtype=dtype,
        seed=seed,
        validation="val" in source.splits,
    )
    _show_source(screen, source)
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
            config,
            source={"path": str(images.absolute()), "seed": seed},
            replace=replace,
            fresh=fresh,
            device=device,
            reporter=reporter,
        )
    screen.result(added(ecology, name, facts), *stages_table(ecology, name, facts))


def join(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="DOMAIN…", show_default=False)
    ] = None,
    variance: Variance = None,
    basis: Annotated[str, typer.Option(help="The name of what they share.")] = "joint",
    epochs: Epochs = None,
    lr: Rate = None,
    norms: Norms = None,
    batch: Batch = BATCH,
    dtype: Dtype = "float16",
    settings: Settings = None,
    fresh: Fresh = False,
    where: Where = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let domains share one C and W, so that each further one costs only a small M.

    covnorm join                      every domain that has a trained A and is in no basis

    covnorm join flowers birds --variance 0.9
    """
    screen, ecology = Screen(json, quiet), find(where)
    set_threads(threads)
    options = given(variance=variance, epochs=epochs, lr=lr, norms=norms, basis=basis)
    options |= pairs(settings or [])
    config = add_config(JOINT, options, batch=batch, dtype=dtype, seed=seed)
    with screen.reporting(named=True) as reporter:
        done = join_domains(
            ecology,
            names or [],
            lambda n: images_of(ecology, n, progress=reporter.images),
            config,
            fresh=fresh,
            device=check_device(device),
            reporter=reporter,
        )
    value = [added(ecology, n, facts) for n, facts in done.items()]
    rows = [
        (r["domain"], r["accuracy"]["final"], r["parameters"]["adapter"], size(r["bytes"]))
        for r in value
    ]
    columns = ("domain", "accuracy %", "own adapter parameters", "own file")
    shared = next(iter(done.values()))["results"]["parameters"].get("shared", 0)
    sharers = sum(entry.basis == basis for entry in ecology.domains.values())
    screen.result(
        {"basis": basis, "shared": shared, "domains": value},
        table("", columns, rows),
        f"basis {basis!r}: {shared:,} parameters, shared by {sharers} domain{'s' * (sharers > 1)}",
    )


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {key: value for key, value in options.items() if value is not None}


def _count(source: Source) -> int:
    return sum(len(items) for items in source.splits.values())


def _show_source(screen: Screen, source: Source) -> None:
    for note in source.notes:
        screen.say(f"note: {note}")
    parts = ", ".join(f"{len(items):,} {split}" for split, items in source.splits.items())
    screen.say(f"{source.path}: {len(source.classes):,} classes; {parts}")


def _show_data(screen: Screen, data: Decoded) -> None:
    for note in data.notes:
        screen.say(f"          note: {note}")
    counts = sorted(data.balance()["train"].items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{c} {n}" for c, n in counts[:6]) + (" …" if len(counts) > 6 else "")
    screen.say(f"          training images a class: {shown}; the fewest: {counts[-1][1]}")
    for file, reason in data.unreadable[:5]:
        screen.say(f"          left out: {file}: {reason}")
    if len(data.unreadable) > 5:
        screen.say(f"          left out: {len(data.unreadable) - 5} more")
    if data.duplicates:
        first = " = ".join(str(part) for part in data.duplicates[0][:2])
        screen.say(
            f"          note: {len(data.duplicates)} images are in two splits, such as {first}: "
            "accuracy may be flattered"
        )
    screen.say(f"          inputs of {data.size} × {data.size} pixels ({data.fit})")
