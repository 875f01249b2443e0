"""`predict`: classify files and folders of images; a table, JSON or .csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..data.image_files import ImageError
from ..data.source import images_below
from ..ecology.prediction import probabilities, read_inputs
from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from ..records import blame
from .options import Compute, Name
from .screen import print_error, table

BATCH = 64  # images in memory at a time
COLUMNS = ("probability %", "answer", "image", "next best")  # what matters most comes first


def predict(
    name: Name,
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGE…", help="Image files, and folders, which are searched."),
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of answers per image.")] = 5,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write a .csv file; - means stdout."),
    ] = None,
    *,
    common: Compute,
) -> None:
    """Classify images with a domain.

    covnorm predict flowers a.jpg b.png --top 3

    covnorm predict flowers photos/ --csv answers.csv

    An unreadable image in a folder is reported on stderr, and the exit code is 2 at the end.
    """
    to_stdout = str(csv_file) == "-"
    if to_stdout and common.json:
        raise CovNormError("--json and --csv - both print on stdout. Give --csv a file.")
    files = [file for path in images for file in _files_at(path)]
    net = common.ecology.network()
    if not common.ecology.load(net, name).classes:
        raise CovNormError(
            f"domain {name!r} has no classes, so it cannot classify images: choose another domain"
        )
    answers: list[dict[str, Any]] = []
    unreadable: list[ImageError] = []
    with common.screen.reporting() as reporter:
        if many := len(files) > BATCH:
            reporter.stage("predict", f"{len(files):,} images")
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            answers += _answers(net.to(common.device), name, part, top, set(images), unreadable)
            if many:
                reporter.images(start + len(part), len(files))
    if to_stdout:
        common.screen.text(_csv(answers))
    elif csv_file is not None:
        with blame(csv_file):
            csv_file.write_bytes(_csv(answers).encode(errors="backslashreplace"))
        common.screen.result(answers, f"wrote {csv_file} ({len(answers):,} images)")
    else:
        common.screen.result(answers, table("", COLUMNS, [_row(answer) for answer in answers]))
    for error in unreadable:
        print_error(str(error))
    if unreadable:
        raise typer.Exit(2)


def _files_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = images_below(path)
    if not files:
        raise CovNormError(f"{path}: no images in this folder. Pass another folder, or files.")
    return files


def _answers(
    net: MultiDomainNetwork,
    name: str,
    files: Sequence[Path],
    top: int,
    given: set[Path],
    unreadable: list[ImageError],
) -> Iterator[dict[str, Any]]:
    """Yield ``{"file", "label", "probability", "top"}`` of every image.

    An unreadable image is an error if it was given by name; else its error joins `unreadable`.
    """
    readable: list[Path] = []
    images: list[Tensor] = []
    for file in files:
        try:
            images.append(read_inputs(net, name, [file]))
            readable.append(file)
        except ImageError as error:
            if file in given:
                raise
            unreadable.append(error)
    if not images:
        return
    classes = net.domain(name).classes or ()
    chances = probabilities(net, name, torch.cat(images))
    best = chances.topk(min(top, len(classes)), dim=1)
    for file, places, values in zip(readable, best.indices, best.values, strict=True):
        pairs = zip(places.tolist(), values.tolist(), strict=True)
        listed = [{"label": classes[i], "probability": p} for i, p in pairs]
        yield {"file": str(file), **listed[0], "top": listed}


def _row(answer: dict[str, Any]) -> tuple[float, str, str, str]:
    others = [f"{other['label']} {100 * other['probability']:.1f}" for other in answer["top"][1:]]
    return 100 * answer["probability"], answer["label"], answer["file"], ", ".join(others)


def _csv(value: Sequence[dict[str, Any]]) -> str:
    """Return a row per image: file, label, probability, then the next best in the same way."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    ranks = range(2, 1 + max((len(answer["top"]) for answer in value), default=1))
    names = [f"{column}_{rank}" for rank in ranks for column in ("label", "probability")]
    writer.writerow(["file", "label", "probability", *names])
    for answer in value:
        cells = [cell for each in answer["top"] for cell in (each["label"], each["probability"])]
        writer.writerow([answer["file"], *cells])
    return stream.getvalue()
