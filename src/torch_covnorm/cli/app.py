"""The command `covnorm`: its subcommands, grouped as the help page shows them, and its errors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import typer

from ..errors import CovNormError
from ..version import __version__
from .add import add, init, join
from .bench import bench
from .demo import demo
from .inspect import list_, report, show, verify
from .options import with_common_options
from .predict import predict
from .screen import print_error
from .serve import serve
from .use import eval_, export
from .versions import gc, history, import_, remove, rollback

INTERRUPTED = 130  # the shells' exit code for SIGINT: 128 + 2
RESUMABLE = {"add", "join", "demo"}
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
    "Build": (init, add, join, import_),
    "Maintain": (history, rollback, remove, gc),
    "Inspect": (list_, show, verify, report),
    "Use": (predict, eval_, export, serve),
    "Try and measure": (demo, bench),
}
for title, functions in COMMANDS.items():
    for function in functions:
        name = function.__name__.rstrip("_")
        app.command(name, rich_help_panel=title)(with_common_options(function))


def main() -> None:
    """Run the command: results on stdout; an error is one line on stderr, exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print_error(f"note: {message}")  # type: ignore[assignment]
            code = app(prog_name="covnorm", standalone_mode=False)
    except CovNormError as error:
        code = print_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:  # the terminal or pipe is gone, or the disk outside the store is full
        code = print_error(f"{error.filename or ''} {error.strerror or error}".strip())
    except Exception as error:
        # A usage error is click's, and newer versions of typer carry their own copy of click.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # empty where the help page was shown instead
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "covnorm"
        code = print_error(f"{message} (see {command} --help)") if message else 2
    if code == INTERRUPTED:  # also returned by typer when it catches the interrupt itself
        resume = ": run the same command again to resume"
        print_error(f"interrupted{resume if RESUMABLE.intersection(sys.argv[1:2]) else ''}")
    sys.exit(code or 0)
