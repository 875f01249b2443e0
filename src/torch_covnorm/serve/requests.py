"""What every route needs of a request: its engine, its id, its form."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import fastapi
from fastapi import Request
from starlette.exceptions import HTTPException

from .engine import Engine
from .refusals import Refused
from .schemas import NAME

DomainName = Annotated[str, fastapi.Path(pattern=NAME, examples=["digits"])]
MOST_PARTS = 256  # files, and fields, of a form


def id_of(request: Request) -> str:
    """As the answer and the log have it."""
    return str(request.scope.get("state", {}).get("request", ""))


def engine_of(request: Request) -> Engine:
    """Of the application."""
    engine: Engine = request.app.state.engine
    return engine


def kind_of(request: Request) -> str:
    """Its content type, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


@contextlib.asynccontextmanager
async def form_of(request: Request) -> AsyncIterator[Any]:
    """A multipart form."""
    try:
        async with request.form(max_files=MOST_PARTS, max_fields=MOST_PARTS) as form:
            yield form
    except HTTPException as broken:
        raise Refused(400, "invalid", str(broken.detail)) from None
