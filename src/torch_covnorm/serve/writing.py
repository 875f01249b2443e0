"""Routes that change the store: PUT and DELETE of a domain. Off unless they are asked for."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import UploadFile

from . import auto, schemas
from .refusals import Refused, invalid
from .requests import DomainName, engine_of, form_of, kind_of
from .schemas import refusals

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.(json|safetensors)")


def add_routes(app: FastAPI) -> None:
    """To the application."""

    @app.put(
        "/v1/domains/{name}",
        status_code=201,
        response_model=schemas.Domain,
        responses=refusals(404, 409, 415, 422, 500, 503),
        openapi_extra=schemas.DOMAIN_FILES,
    )
    async def put(request: Request, name: DomainName, replace: bool = False) -> dict[str, Any]:
        """Keep an uploaded domain; it is served from now on."""
        if name == auto.NAME:
            raise invalid(f"{name!r} lets the server name the domain: take another name")
        if kind_of(request) != "multipart/form-data":
            raise Refused(415, "media_type", "send the domain's files as a form")
        engine = engine_of(request)
        with tempfile.TemporaryDirectory() as folder:
            async with form_of(request) as form:
                for part in form.getlist("file"):
                    if isinstance(part, UploadFile):
                        await _keep(Path(folder), part)
            await engine.keep(name, folder, replace)
        return engine.catalog.find(name).facts

    @app.delete("/v1/domains/{name}", status_code=204, responses=refusals(404, 409, 422))
    async def delete(request: Request, name: DomainName) -> None:
        """Forget a domain."""
        await engine_of(request).forget(name)


async def _keep(folder: Path, part: UploadFile) -> None:
    """One file of an upload, under the plain name that it must have; never where it says."""
    name = (part.filename or "").replace("\\", "/")
    place, _, plain = name.rpartition("/")
    inside = "basis" if place.rpartition("/")[2] == "basis" else "."
    if not _FILE.fullmatch(plain):
        raise invalid(f"file {name[:64]!r}: not the name of a domain's file")
    (folder / inside).mkdir(exist_ok=True)
    (folder / inside / plain).write_bytes(await part.read())
