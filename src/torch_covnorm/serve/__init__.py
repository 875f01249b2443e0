"""The server: every domain of an ecology from one network, over HTTP. Needs the extra `serve`."""

from __future__ import annotations

from .keys import Keys
from .limits import Limits

__all__ = ["Keys", "Limits", "serve"]


def serve(*args: object, **kwargs: object) -> None:
    """Serve an ecology until SIGTERM or SIGINT; see `running.serve`."""
    from .running import serve as run

    run(*args, **kwargs)  # type: ignore[arg-type]
