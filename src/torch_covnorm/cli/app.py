"""Every subcommand of `covnorm`, in the order in which one meets them."""

from __future__ import annotations

import typer

from ..version import __version__
from . import add as adding
from . import bench as measuring
from . import demo
from . import inspect as looking
from . import serve as serving
from . import use as using

EPILOG = "First steps: covnorm init house; cd house; covnorm add flowers ../photos; covnorm list"

app = typer.Typer(
    name="covnorm",
    help="One frozen network, many domains: each task adds a few hundred kilobytes to it.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"covnorm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
) -> None:
    """Hold what comes before a subcommand."""


COMMANDS = {
    function.__name__.rstrip("_"): function
    for function in (
        adding.init,
        adding.add,
        adding.join,
        looking.list_,
        looking.show,
        using.predict,
        using.eval_,
        looking.remove,
        looking.verify,
        using.export,
        looking.report,
        serving.serve,
        measuring.bench,
        demo.demo,
    )
}
for name, function in COMMANDS.items():
    app.command(name)(function)
