"""The command `covnorm`."""

from __future__ import annotations

import sys
import warnings

from ..errors import CovNormError

INTERRUPTED = 130  # the shells' exit code for SIGINT: 128 + 2
RESUMABLE = {"add", "join", "demo"}


def main() -> None:
    """Run the command: results on stdout; an error is one line on stderr, exit code 2."""
    import typer

    from .app import app

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning  # type: ignore[assignment]
            code = app(prog_name="covnorm", standalone_mode=False)
    except CovNormError as error:
        code = _print_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:  # the terminal or pipe is gone, or the disk outside the store is full
        code = _print_error(f"{error.filename or ''} {error.strerror or error}".strip())
    except Exception as error:
        # A usage error is click's, and newer versions of typer carry their own copy of click.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # empty where the help page was shown instead
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "covnorm"
        code = _print_error(f"{message} (see {command} --help)") if message else 2
    if code == INTERRUPTED:  # also returned by typer when it catches the interrupt itself
        resume = ": run the same command again to resume"
        _print_error(f"interrupted{resume if RESUMABLE.intersection(sys.argv[1:2]) else ''}")
    sys.exit(code or 0)


def _print_error(message: str) -> int:
    print(f"covnorm: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _print_warning(message: object, *_: object) -> None:
    print(f"covnorm: note: {' '.join(str(message).split())}", file=sys.stderr)
