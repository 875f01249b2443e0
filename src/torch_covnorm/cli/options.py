"""The options that several commands share, each said once; where the ecology is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..ecology import Ecology
from ..ecology.manifest import MANIFEST
from ..errors import CovNormError

VARIABLE = "COVNORM_ECOLOGY"


def find(folder: Path | None) -> Ecology:
    """The ecology that is meant."""
    return Ecology(place(folder))


def place(folder: Path | None) -> Path:
    """Its folder: the option's, the variable's, or the nearest one above."""
    if folder is None and os.environ.get(VARIABLE):
        folder = Path(os.environ[VARIABLE])
    if folder is not None:
        return folder
    here = Path.cwd()
    for above in (here, *here.parents):
        if (above / MANIFEST).is_file():
            return above
    raise CovNormError(
        f"{here}: no ecology here or above: covnorm init FOLDER makes one, --ecology FOLDER or "
        f"${VARIABLE} names one"
    )


def set_threads(threads: int | None) -> None:
    """As many threads as asked for."""
    if threads is not None:
        torch.set_num_threads(threads)


def check_device(device: str) -> str:
    """A device that torch has."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CovNormError(f"--device {device}: {reason}: choose cpu, cuda or mps") from None
    return device


def domain_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    try:
        return [name for name in find(None).domains if name.startswith(incomplete)]
    except CovNormError:
        return []


def pairs(given: list[str]) -> dict[str, Any]:
    """``key=value`` as settings; a value is JSON where it can be, else text."""
    import json

    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise CovNormError(f"--set {text}: give KEY=VALUE, such as --set weight_decay=0.1")
        try:
            found[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[key.replace("-", "_")] = value
    return found


WHERE = f"Its folder; else ${VARIABLE}, else the nearest one above."
Where = Annotated[Path | None, typer.Option("--ecology", help=WHERE, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show results and errors alone.")]
Seed = Annotated[int, typer.Option(help="Of all random numbers: the same seed, the same file.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Of torch; else as it decides.", show_default=False)
]
Name = Annotated[
    str, typer.Argument(metavar="DOMAIN", autocompletion=domain_names, show_default=False)
]
