"""Start the server and stop it: the socket, the signals, the last requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..ecology import Ecology
from ..errors import CovNormError
from .app import make_app
from .keys import Keys
from .limits import Limits
from .log import LOG, log_to_stderr

BACKLOG = 1024  # connections that wait to be accepted
LAST = 0.1  # seconds in which what was accepted brings its first bytes


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
    for name in limits.pins:
        ecology.entry(name)
    ecology.network()  # what no worker could begin with is an error now
    listening = _listen(host, port)
    log_to_stderr(json_logs)
    address = f"http://{_shown(host)}:{listening.getsockname()[1]}"
    LOG.info("listening", extra={"said": {"address": address, "ecology": str(ecology.folder)}})
    if told is not None:
        told(address)
    app = make_app(ecology, limits, keys, allow_writes)
    config = uvicorn.Config(
        app,
        http=partial(_Protocol, patience=limits.upload),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=math.ceil(limits.upload),
        timeout_graceful_shutdown=math.ceil(limits.grace),
        backlog=BACKLOG,
        server_header=False,
    )
    _Server(config).run(sockets=[listening])
    LOG.info("stopped", extra={"said": {"address": address}})


class _Server(uvicorn.Server):
    """One that ends well when it is asked to: uvicorn's raises the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT begin the stop; a second one hurries it."""
        before = {n: signal.signal(n, self._begin_stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin_stop(self, *_: Any) -> None:
        self.should_exit, self.force_exit = True, self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door first, and read what came in before; only then are idle ones closed."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(LAST)
        await super().shutdown(sockets)


class _Protocol(H11Protocol):
    """uvicorn's, but a connection that brings no whole header for long is closed."""

    def __init__(self, *args: Any, patience: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody came."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Somebody went."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next request may come, or the rest of one that was refused."""
        super().on_response_complete()
        self._expect()

    def _expect(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._patience, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_handler()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's delay off only where the protocol is named: 40 ms an answer.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(BACKLOG)
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
