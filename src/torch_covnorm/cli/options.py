"""Options that several commands share, each declared once."""

from __future__ import annotations

import contextlib
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
from ..threads import default_threads
from .device import check_device
from .screen import Screen

VARIABLE = "COVNORM_ECOLOGY"
ECOLOGY_HELP = (
    f"Folder of the ecology. Default: ${VARIABLE}, or else the nearest ecology at or above the "
    "working directory."
)


def panel(title: str) -> Callable[..., Any]:
    """Return a function (help text, option names, settings) that declares options of a panel."""
    return lambda text, *names, **settings: typer.Option(
        *names, help=text, rich_help_panel=title, **settings
    )


run_option = panel("Run")


def ecology_folder(given: Path | None) -> Path:
    """Return the folder given, else the one in $COVNORM_ECOLOGY, else the nearest one above."""
    if given or os.environ.get(VARIABLE):
        return given or Path(os.environ[VARIABLE])
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / MANIFEST).is_file():
            return folder
    raise CovNormError(
        f"{here}: no ecology here or above. Create one with covnorm init FOLDER, or name one with "
        f"--ecology FOLDER or ${VARIABLE}."
    )


def domain_names(incomplete: str) -> list[str]:
    """Return the domain names that complete a word, for the shell's completion."""
    with contextlib.suppress(CovNormError):
        return [n for n in Ecology(ecology_folder(None)).domains if n.startswith(incomplete)]
    return []


def version_names(incomplete: str) -> list[str]:
    """Return the names that complete a word, of removed domains too, for the shell's completion."""
    with contextlib.suppress(CovNormError):
        ecology = Ecology(ecology_folder(None))
        known = {**ecology.domains, **ecology.versions}
        return [name for name in known if name.startswith(incomplete)]
    return []


def pairs(given: list[str]) -> dict[str, Any]:
    """Parse ``key=value`` settings; a value is JSON if it parses as JSON, and text otherwise."""
    settings: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise CovNormError(
                f"--set {text}: expected KEY=VALUE, for example --set weight_decay=0.1"
            )
        settings[key.replace("-", "_")] = value
        with contextlib.suppress(ValueError):
            settings[key.replace("-", "_")] = json.loads(value)
    return settings


Seed = Annotated[int, run_option("Seed of all random numbers, those of splits included.")]
Threads = Annotated[
    int | None,
    run_option("CPU threads. Default: $OMP_NUM_THREADS, or else every CPU it may use.", min=1),
]
TrustCode = Annotated[
    bool,
    run_option(
        "Run a backbone that is code (file.py:function) from a store of someone else. Read it "
        "first: it can do anything that you can.",
        "--trust-code",
    ),
]
Name = Annotated[
    str, typer.Argument(metavar="DOMAIN", autocompletion=domain_names, help="Name of a domain.")
]


def use_threads(given: int | None) -> None:
    """Compute with so many threads, or else with as many as this process may use."""
    if (threads := given or default_threads()) is not None:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Output:
    """The options of every command that prints a result."""

    json: Annotated[bool, run_option("Print the result as JSON on stdout.", "--json")] = False
    quiet: Annotated[bool, run_option("Print only results and errors.", "--quiet", "-q")] = False

    @cached_property
    def screen(self) -> Screen:
        """Where the command prints."""
        return Screen(self.json, self.quiet)


@dataclass(frozen=True)
class Common(Output):
    """The options of every command that works on an existing ecology."""

    where: Annotated[Path | None, run_option(ECOLOGY_HELP, "--ecology")] = None

    @cached_property
    def ecology(self) -> Ecology:
        """The ecology, opened."""
        return Ecology(ecology_folder(self.where))


@dataclass(frozen=True)
class Opening(Common):
    """The options of every command that also opens the network."""

    trust_code: TrustCode = False

    @cached_property
    def ecology(self) -> Ecology:
        """The ecology, opened."""
        return Ecology(ecology_folder(self.where), self.trust_code)


@dataclass(frozen=True)
class Compute(Opening):
    """The options of every command that also runs the network."""

    device: Annotated[str, run_option("cpu, cuda or mps.")] = "cpu"
    threads: Threads = None

    def __post_init__(self) -> None:
        use_threads(self.threads)
        check_device(self.device)


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `common` the options that are the fields of its dataclass.

    Typer reads a command's options from its signature, so ``common: Common`` is replaced there by
    Common's fields. A command without `common` is returned unchanged.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    if (common := parameters.pop("common", None)) is None:
        return command
    group, hints = common.annotation, get_type_hints(common.annotation, include_extras=True)
    # The most specific class comes first, so that help shows what all commands share at the end.
    names = [name for cls in group.__mro__ for name in inspect.get_annotations(cls)]
    for name in names:
        default = getattr(group, name)
        parameters[name] = common.replace(name=name, default=default, annotation=hints[name])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        shared = {name: given.pop(name) for name in names}
        command(**given, common=group(**shared))

    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return run
