"""`eval`, `export`: the commands that use a domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..ecology.images import images_of
from ..ecology.measure import held_out, percent
from ..ecology.prediction import probabilities
from ..errors import CovNormError, choices
from ..report.wording import size
from .options import Compute, Name, Opening


def eval_(
    name: Name,
    images: Annotated[
        Path | None,
        typer.Argument(
            metavar="IMAGES",
            help="Labeled images in any format that add reads. Default: the test images that the "
            "domain was added with.",
        ),
    ] = None,
    *,
    common: Compute,
) -> None:
    """Measure the accuracy of a domain on its test images or on other labeled images.

    covnorm eval flowers

    covnorm eval flowers new-photos/
    """
    net = common.ecology.network()
    classes = common.ecology.load(net, name).classes or ()
    with common.screen.reporting() as reporter:
        reporter.stage("decode", "the labeled images")
        data = images_of(common.ecology, name, images, reporter.images)
    unknown = sorted(set(data.classes) - set(classes))
    if unknown:
        raise CovNormError(
            f"{images}: domain {name!r} has no class {unknown[0]!r}: {choices(unknown[0], classes)}"
        )
    split = held_out(data) if images is None else "all"
    parts = list(data.splits.values()) if split == "all" else [data.splits[split]]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    labels = torch.tensor([classes.index(c) for c in data.classes])[y]
    accuracy = percent(probabilities(net.to(common.device), name, x).argmax(1) == labels)
    value = {"domain": name, "accuracy": accuracy, "n": len(y), "on": split}
    text = f"{name}: {accuracy:.1f} % accuracy on {len(y):,} images ({split})"
    common.screen.result(value, text)


def export(
    name: Name,
    to: Annotated[
        str | None,
        typer.Option(
            help="onnx, torch, state-dict or domain. Default: by --out's ending, or torch."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File or folder to write. Default: a file named after the domain, here."),
    ] = None,
    *,
    common: Opening,
) -> None:
    """Export a domain as a plain network with its adapters folded in.

    The format torch is a torch.export program, domain the files that save_domain writes.

    covnorm export flowers --to onnx
    """
    from ..engines.export import ENDINGS
    from ..engines.export import export as export_domain

    net = common.ecology.network()
    common.ecology.load(net, name)
    to = to or {v: k for k, v in ENDINGS.items()}.get(out.suffix if out else "", "torch")
    done = export_domain(net, name, out or Path(), to)
    files = [str(f) for f in done.files]
    value = {"domain": name, **vars(done), "files": files}
    common.screen.result(value, f"wrote {', '.join(files)} ({size(done.bytes)})")
