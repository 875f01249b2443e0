"""Options that several commands share, each declared once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer

from ..ecology import Ecology
from ..ecology.manifest import MANIFEST
from ..errors import CovNormError
from .screen import Screen

VARIABLE = "COVNORM_ECOLOGY"
ECOLOGY_HELP = (
    f"Folder of the ecology. Default: ${VARIABLE}, or else the nearest ecology at or above the "
    "working directory."
)


def panel(title: str) -> Callable[..., Any]:
    """Return a function (help text, option names, settings) that declares options of a panel."""

    def option(text: str, *names: str, **settings: Any) -> Any:
        return typer.Option(*names, help=text, rich_help_panel=title, **settings)

    return option


run_option = panel("Run")


def ecology_folder(given: Path | None) -> Path:
    """Return the folder given, else the one in $COVNORM_ECOLOGY, else the nearest one above."""
    if given is None and os.environ.get(VARIABLE):
        given = Path(os.environ[VARIABLE])
    if given is not None:
        return given
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / MANIFEST).is_file():
            return folder
    raise CovNormError(
        f"{here}: no ecology here or above. Create one with covnorm init FOLDER, or name one with "
        f"--ecology FOLDER or ${VARIABLE}."
    )


def set_threads(threads: int | None) -> None:
    """Set the number of threads that torch uses, if one is given."""
    if threads is not None:
        torch.set_num_threads(threads)


def check_device(device: str) -> str:
    """Return the device if torch can use it, else raise an error."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CovNormError(f"--device {device}: {reason}. Choose cpu or another device.") from None
    return device


def domain_names(incomplete: str) -> list[str]:
    """Return the domain names that complete a word, for the shell's completion."""
    try:
        names = Ecology(ecology_folder(None)).domains
    except CovNormError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def pairs(given: list[str]) -> dict[str, Any]:
    """Parse ``key=value`` settings; a value is JSON if it parses as JSON, and text otherwise."""
    settings = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise CovNormError(
                f"--set {text}: expected KEY=VALUE, for example --set weight_decay=0.1"
            )
        try:
            settings[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            settings[key.replace("-", "_")] = value
    return settings


Json = Annotated[bool, run_option("Print the result as JSON on stdout.", "--json")]
Quiet = Annotated[bool, run_option("Print only results and errors.", "--quiet", "-q")]
Seed = Annotated[int, run_option("Seed of all random numbers and of the splits made here.")]
Threads = Annotated[int | None, run_option("CPU threads. Default: chosen by torch.", min=1)]
Name = Annotated[
    str, typer.Argument(metavar="DOMAIN", autocompletion=domain_names, help="Name of a domain.")
]


@dataclass(frozen=True)
class Common:
    """The options of every command that works on an existing ecology."""

    where: Annotated[Path | None, run_option(ECOLOGY_HELP, "--ecology")] = None
    json: Json = False
    quiet: Quiet = False

    @cached_property
    def folder(self) -> Path:
        """The ecology's folder, which may turn out to be damaged or missing."""
        return ecology_folder(self.where)

    @cached_property
    def ecology(self) -> Ecology:
        """The ecology, opened."""
        return Ecology(self.folder)

    @cached_property
    def screen(self) -> Screen:
        """Where the command prints."""
        return Screen(self.json, self.quiet)


@dataclass(frozen=True)
class Compute(Common):
    """The options of every command that also runs the network."""

    device: Annotated[str, run_option("cpu, cuda or mps.")] = "cpu"
    threads: Threads = None

    def __post_init__(self) -> None:
        set_threads(self.threads)
        check_device(self.device)


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `common` the options that are the fields of its dataclass.

    Typer reads a command's options from its signature, so ``common: Common`` is replaced there by
    Common's fields. A command without `common` is returned unchanged.
    """
    signature = inspect.signature(command, eval_str=True)
    if "common" not in signature.parameters:
        return command
    group = signature.parameters["common"].annotation
    hints = get_type_hints(group, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(group)
    ]
    others = [p.replace(kind=keyword) for p in signature.parameters.values() if p.name != "common"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        common = group(**{p.name: given.pop(p.name) for p in shared})
        command(**given, common=common)

    run.__signature__ = signature.replace(parameters=[*others, *shared])  # type: ignore[attr-defined]
    return run
