"""The command `covnorm`."""

from __future__ import annotations

import sys
import warnings

from ..errors import CovNormError

INTERRUPTED = 130  # as shells have it: 128 and the signal's number


def main() -> None:
    """Run the command: results on stdout; an error is one line on stderr, exit code 2."""
    import typer

    from .app import app

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
            code = app(prog_name="covnorm", standalone_mode=False)
    except CovNormError as error:
        code = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:  # the terminal or pipe is gone, or the disk full outside the store
        code = _fail(f"{error.filename or ''} {error.strerror or error}".strip())
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own words for wrong usage
            raise
        words = error.format_message()  # none where help was shown instead
        code = _fail(f"{words} ({_command()} --help)") if words else 2
    if code == INTERRUPTED:  # which typer may have caught itself
        resumes = _command().split()[-1] in ("add", "join", "demo")
        _fail(f"interrupted{': give the same command again, and it goes on' * resumes}")
    sys.exit(code or 0)


def _command() -> str:
    """What was called, as far as it is known."""
    from .app import COMMANDS

    named = [word for word in sys.argv[1:2] if word in COMMANDS]
    return " ".join(["covnorm", *named])


def _fail(message: str) -> int:
    print(f"covnorm: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _warn(message: object, *_: object) -> None:
    print(f"covnorm: note: {' '.join(str(message).split())}", file=sys.stderr)
