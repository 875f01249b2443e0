"""`predict`, `eval`, `export`: a domain at work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..ecology.images import images_of
from ..ecology.measure import held_out, percent
from ..ecology.prediction import probabilities, read_inputs
from ..errors import CovNormError, choices
from .options import Device, Json, Name, Quiet, Threads, Where, check_device, find, set_threads
from .screen import Screen, size, table


def predict(
    name: Name,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="How many answers an image.")] = 5,
    where: Where = None,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what images show, by a domain.

    covnorm predict flowers a.jpg b.png --top 3
    """
    screen, ecology = Screen(json, quiet), find(where)
    set_threads(threads)
    net = ecology.network()
    classes = ecology.load(net, name).classes or ()
    if not classes:
        raise CovNormError(f"domain {name!r} has no classes to answer with: it is no classifier")
    inputs = read_inputs(net, name, images)
    found = probabilities(net.to(check_device(device)), name, inputs)
    best = found.topk(min(top, len(classes)), dim=1)
    value = []
    for file, values, places in zip(images, best.values, best.indices, strict=True):
        answers = [
            {"label": classes[i], "probability": p}
            for i, p in zip(places.tolist(), values.tolist(), strict=True)
        ]
        value.append({"file": str(file), **answers[0], "top": answers})
    rows = [
        (
            row["file"],
            row["label"],
            100 * row["probability"],
            ", ".join(f"{a['label']} {100 * a['probability']:.1f}" for a in row["top"][1:]),
        )
        for row in value
    ]
    screen.result(value, table("", ("image", "answer", "sure %", "or"), rows))


def eval_(
    name: Name,
    images: Annotated[
        Path | None, typer.Argument(metavar="FOLDER|CSV|NPZ", show_default=False)
    ] = None,
    where: Where = None,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a domain on the test images that it was made with, or on all of some others.

    covnorm eval flowers

    covnorm eval flowers new-photos/
    """
    screen, ecology = Screen(json, quiet), find(where)
    set_threads(threads)
    net = ecology.network()
    classes = ecology.load(net, name).classes or ()
    with screen.reporting() as reporter:
        reporter.stage("decode", "the labelled images")
        data = images_of(ecology, name, images, reporter.images)
    if set(data.classes) - set(classes):
        extra = sorted(set(data.classes) - set(classes))
        raise CovNormError(
            f"{images}: class {extra[0]!r} is none of domain {name!r}: {choices(extra[0], classes)}"
        )
    split = "all"
    if images is None:
        split = held_out(data)
        x, y = data.splits[split].x, data.splits[split].y
    else:
        x = torch.cat([part.x for part in data.splits.values()])
        y = torch.cat([part.y for part in data.splits.values()])
    places = torch.tensor([classes.index(c) for c in data.classes])
    answers = probabilities(net.to(check_device(device)), name, x).argmax(1)
    accuracy = percent(answers == places[y])
    value = {"domain": name, "accuracy": accuracy, "n": len(y), "on": split}
    screen.result(value, f"{name}: {accuracy:.1f} % of {len(y):,} images right ({split})")


def export(
    name: Name,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="onnx, torch (torch.export), state-dict or domain; else by the ending of --out.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; else by the domain's name.", show_default=False),
    ] = None,
    where: Where = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a domain as a network that needs nothing of ours, adapters folded in.

    covnorm export flowers --to onnx
    """
    from ..engines.export import ENDINGS
    from ..engines.export import export as export_domain

    screen, ecology = Screen(json, quiet), find(where)
    net = ecology.network()
    ecology.load(net, name)
    by_ending = {ending: form for form, ending in ENDINGS.items()}
    to = to or by_ending.get(out.suffix if out else "", "torch")
    done = export_domain(net, name, out or Path(), to)
    files = [str(f) for f in done.files]
    value = {"domain": name, "to": done.to, "files": files, "bytes": done.bytes}
    value["difference"] = done.difference
    screen.result(value, f"wrote {', '.join(files)} ({size(done.bytes)})")
