"""The FastAPI application, and its server: socket, signals, requests that are under way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..ecology import Ecology
from ..errors import CovNormError
from ..version import __version__
from .engine import Engine
from .errors import RequestError
from .guard import Guard, error_response
from .keys import Keys
from .limits import Limits
from .log import LOG, log_to_stderr
from .routes import invalid_input, router, write_router

BACKLOG = 1024  # connections that wait to be accepted
LINGER = 0.1  # seconds in which accepted connections may send their first bytes


def serve(
    ecology: Ecology,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    limits: Limits | None = None,
    keys: Keys | None = None,
    allow_writes: bool = False,
    json_logs: bool = False,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Requests accepted by then still get their result.

    Args:
        port: 0 chooses a free port.
        on_listening: called with the address as soon as the server listens.
    """
    limits = limits or Limits()
    for name in limits.pins:
        ecology.entry(name)
    ecology.network()  # fails here rather than in every worker
    listener = _listen(host, port)
    log_to_stderr(json_logs)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    LOG.info("listening", extra={"fields": {"address": address, "ecology": str(ecology.folder)}})
    if on_listening is not None:
        on_listening(address)
    config = uvicorn.Config(
        make_app(ecology, limits, keys, allow_writes),
        http=partial(_Protocol, header_timeout=limits.upload),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=math.ceil(limits.upload),
        timeout_graceful_shutdown=math.ceil(limits.grace),
        backlog=BACKLOG,
        server_header=False,
    )
    _Server(config).run(sockets=[listener])
    LOG.info("stopped", extra={"fields": {"address": address}})


def make_app(
    ecology: Ecology, limits: Limits, keys: Keys | None = None, allow_writes: bool = False
) -> FastAPI:
    """Return the application for a store. Its engine lives from startup to shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = app.state.engine = Engine(ecology, limits)
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(
        routes=[*router.routes, *(write_router.routes if allow_writes else ())],
        title="torch-covnorm",
        version=__version__,
        description="One frozen network, many domains. Each image is predicted by its domain.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Guard, limits=limits, keys=keys or Keys())

    # FastAPI's errors get the JSON of ours. `Guard` handles every other error.
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(invalid_input(error.errors()), request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        ours = RequestError("http", error.detail, status=error.status_code)
        response = error_response(ours, request.scope)
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of the first route only
            matching = [r for r in app.routes if r.matches(request.scope)[0] is not Match.NONE]
            methods = {method for route in matching for method in getattr(route, "methods", ())}
            response.headers["Allow"] = ", ".join(sorted(methods))
        return response

    return app


class _Server(uvicorn.Server):
    """Uvicorn's server, but it exits with 0 after a signal instead of raising it again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on the first SIGTERM or SIGINT; on the second one, without waiting."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = {number: signal.signal(number, self._begin_stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _begin_stop(self, *_: Any) -> None:
        self.should_exit, self.force_exit = True, self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and read what has arrived, before idle connections are closed."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(LINGER)
        await super().shutdown(sockets)


class _Protocol(H11Protocol):
    """Uvicorn's protocol, but it closes connections that do not complete a header in time."""

    def __init__(self, *args: Any, header_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout = header_timeout
        self._timer = self.loop.call_later(header_timeout, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next header, or the rest of a request that was rejected early."""
        super().on_response_complete()
        self._timer.cancel()
        self._timer = self.loop.call_later(self._header_timeout, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_handler()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's delay (40 ms per response) only if the protocol is given.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CovNormError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): use another --host or "
            "--port"
        ) from None
    return listener


def print_address(address: str) -> None:
    """Print the address as JSON on stdout, for programs that start a server."""
    print(json.dumps({"address": address}), flush=True)
