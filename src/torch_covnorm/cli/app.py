"""The subcommands of `covnorm`, grouped as its help page shows them."""

from __future__ import annotations

from collections.abc import Callable

import typer

from ..version import __version__
from .add import add, init, join
from .bench import bench
from .demo import demo
from .inspect import list_, remove, report, show, verify
from .options import with_common_options
from .serve import serve
from .use import eval_, export, predict

app = typer.Typer(
    name="covnorm",
    help="One frozen network, many domains: each task adds a few hundred kilobytes to it.",
    epilog="First steps: covnorm init house; cd house; covnorm add flowers ../photos; covnorm list",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"covnorm {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Accept the options that precede a subcommand."""


COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Build": (init, add, join, remove),
    "Inspect": (list_, show, verify, report),
    "Use": (predict, eval_, export, serve),
    "Try and measure": (demo, bench),
}
for title, functions in COMMANDS.items():
    for function in functions:
        name = function.__name__.rstrip("_")
        app.command(name, rich_help_panel=title)(with_common_options(function))
