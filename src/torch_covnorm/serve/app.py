"""The application: an engine as long as it runs, the routes, and how refusals look."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from ..ecology import Ecology
from ..version import __version__
from . import looking, predicting, writing
from .engine import Engine
from .guard import Guard, error
from .keys import Keys
from .limits import Limits
from .metrics import Metrics
from .refusals import Refused, invalid
from .requests import id_of


def make_app(
    ecology: Ecology,
    limits: Limits | None = None,
    keys: Keys | None = None,
    allow_writes: bool = False,
) -> FastAPI:
    """The application over a store; its engine lives as long as it runs."""
    limits, keys = limits or Limits(), keys or Keys()
    idle = Metrics()

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        engine = app.state.engine = Engine(ecology, limits)
        engine.run()
        try:
            yield
        finally:
            await engine.drain()
            await engine.stop()

    app = FastAPI(
        title="torch-covnorm",
        version=__version__,
        description="One frozen network, many domains: each image is answered by its own.",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.engine = None

    def metrics() -> Metrics:
        return idle if app.state.engine is None else app.state.engine.metrics

    _handle_errors(app, metrics)
    looking.add_routes(app)
    predicting.add_routes(app, limits)
    if allow_writes:
        writing.add_routes(app)
    app.add_middleware(Guard, limits=limits, keys=keys, metrics=metrics)
    return app


def _handle_errors(app: FastAPI, metrics: Callable[[], Metrics]) -> None:
    def answer(request: Request, refused: Refused) -> Response:
        return error(refused, id_of(request), metrics())

    async def refused(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, Refused)
        return answer(request, exception)

    async def wrong(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, RequestValidationError)
        first = exception.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(request, invalid(f"{where}: {first['msg']}"))

    async def plain(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, HTTPException)
        found = answer(request, Refused(exception.status_code, "http", exception.detail))
        found.headers.update(exception.headers or {})
        if exception.status_code == 405:  # of all routes at this place, not of the first alone
            there = [r for r in app.routes if r.matches(request.scope)[0] is not Match.NONE]
            methods = {method for route in there for method in getattr(route, "methods", ())}
            found.headers["Allow"] = ", ".join(sorted(methods))
        return found

    async def gone(request: Request, _: Exception) -> Response:
        return answer(request, Refused(400, "client_gone", "the client went away"))

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(RequestValidationError, wrong)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(ClientDisconnect, gone)
