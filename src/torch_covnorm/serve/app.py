"""The FastAPI application: its engine, its routes, and its error responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ..ecology import Ecology
from ..version import __version__
from .engine import Engine
from .errors import RequestError
from .guard import Guard, error_response
from .keys import Keys
from .limits import Limits
from .routes import invalid_input, router, write_router


def make_app(
    ecology: Ecology,
    limits: Limits | None = None,
    keys: Keys | None = None,
    allow_writes: bool = False,
) -> FastAPI:
    """Return the application for a store. Its engine lives from startup to shutdown."""
    limits = limits or Limits()

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
        openapi_url="/openapi.json",
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
