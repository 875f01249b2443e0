"""Start the server and stop it: the socket, the signals, the last requests."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from ..ecology import Ecology
from ..errors import CovNormError
from .app import make_app
from .guard import LOG, Keys, log_to_stderr
from .limits import Limits


def serve(
    ecology: Ecology,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    limits: Limits | None = None,
    keys: Keys | None = None,
    allow_writes: bool = False,
    json_logs: bool = False,
    told: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: what was accepted by then is still answered.

    port: 0 takes a free one. told: called with the address once it listens.
    """
    limits = limits or Limits()
    log_to_stderr(json_logs)
    listening = _listen(host, port)
    address = f"http://{_shown(host)}:{listening.getsockname()[1]}"
    LOG.info("listening", extra={"said": {"address": address, "ecology": str(ecology.folder)}})
    if told is not None:
        told(address)
    app = make_app(ecology, limits, keys, allow_writes)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.grace),
        backlog=1024,
        server_header=False,
    )
    _Server(config).run(sockets=[listening])
    LOG.info("stopped", extra={"said": {"address": address}})


class _Server(uvicorn.Server):
    """One that ends well when it is asked to: uvicorn's raises the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT begin the stop; a second one hurries it."""
        before = {n: signal.signal(n, self.handle_exit) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        why = error.strerror or error
        raise CovNormError(f"{host}:{port}: cannot listen there ({why}): take another") from None
    return made


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def print_address(address: str) -> None:
    """As JSON on stdout, for programs that start a server."""
    print(json.dumps({"address": address}), flush=True, file=sys.stdout)
