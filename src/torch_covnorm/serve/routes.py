"""Every route of the API. Those of `write_router` change the store and are off by default."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from . import schemas
from .auto import AUTO
from .engine import Engine
from .errors import RequestError
from .queue import ImageResult
from .schemas import error_responses

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; form-action 'none'; "
    "base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
FORM = "multipart/form-data"
PARTS = 256  # files, and fields, per form
MARKS, MARKS_PER_ITEM = (b"{", b"[", b",", b'"'), 32  # of JSON; a real item has a dozen
PREDICT_ERRORS = error_responses(404, 409, 415, 422, 429, 500, 503, 504)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.(json|safetensors)")

router, write_router = APIRouter(), APIRouter()


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


EngineOf = Annotated[Engine, Depends(_engine)]
DomainName = Annotated[str, fastapi.Path(pattern=schemas.NAME, examples=["digits"])]
Top = Annotated[int, Query(ge=1, description="Number of predictions per image.")]

# ── state ────────────────────────────────────────────────────────────────────────────────────


@router.get("/live", responses=error_responses())
async def live() -> schemas.State:
    """Return 200 if the server process answers."""
    return schemas.State(ok=True)


@router.get("/ready", responses=error_responses(503))
async def ready(engine: EngineOf) -> schemas.State:
    """Return 200 if a forward pass succeeded recently in every worker."""
    if not engine.ready:
        message = "a worker is starting, hanging or being replaced. Try again later."
        raise RequestError("not_ready", message, retry=1.0)
    return schemas.State(ok=True)


@router.get("/metrics", response_class=Response, responses=schemas.text_response("text/plain"))
async def metrics(engine: EngineOf) -> Response:
    """Return the metrics for Prometheus."""
    return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/v1/status", responses=error_responses())
async def status(engine: EngineOf) -> dict[str, Any]:
    """Return what the page shows: load, memory, workers."""
    return engine.status()


@router.get("/", response_class=Response, responses=schemas.text_response("text/html"))
async def page() -> Response:
    """Return a web page to try the server."""
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)


# ── domains ──────────────────────────────────────────────────────────────────────────────────


@router.get("/v1/domains", responses=error_responses())
async def domains(engine: EngineOf) -> schemas.Domains:
    """List every domain of the store."""
    return schemas.Domains(domains=[_shown(engine, n) for n in sorted(engine.catalog.entries())])


@router.get("/v1/domains/{name}", responses=error_responses(404, 409, 422))
async def domain(engine: EngineOf, name: DomainName) -> schemas.Domain:
    """Return one domain, with its class names."""
    served = engine.catalog.find(name)
    return _shown(engine, name, classes=served.classes, size=served.shape.size)


def _shown(engine: Engine, name: str, **more: Any) -> schemas.Domain:
    fields = vars(engine.catalog.find_entry(name)) | more
    return schemas.Domain(domain=name, resident=engine.is_resident(name), **fields)


@write_router.put(
    "/v1/domains/{name}",
    status_code=201,
    responses=error_responses(404, 409, 415, 422, 500, 503),
    openapi_extra=schemas.DOMAIN_FILES,
)
async def put(
    request: Request, engine: EngineOf, name: DomainName, replace: bool = False
) -> schemas.Domain:
    """Store an uploaded domain and serve it."""
    if name == AUTO:
        raise RequestError("invalid", f"{name!r} is reserved. Use another domain name.")
    if _content_type(request) != FORM:
        raise RequestError("media_type", f"send the domain's files as {FORM}")
    with tempfile.TemporaryDirectory() as folder:
        async with _form(request, "file") as (_, files):
            for file in files:
                await _save(Path(folder), file)
        await engine.store_domain(name, folder, replace)
    return await domain(engine, name)


@write_router.delete(
    "/v1/domains/{name}", status_code=204, responses=error_responses(404, 409, 422)
)
async def delete(engine: EngineOf, name: DomainName, purge: bool = False) -> None:
    """Remove a domain. `covnorm rollback` restores it, unless `purge` deletes its versions too."""
    await engine.remove_domain(name, purge)


# ── predictions ──────────────────────────────────────────────────────────────────────────────


@router.post(
    "/v1/domains/{name}/predict", responses=PREDICT_ERRORS, openapi_extra=schemas.ONE_IMAGE
)
async def predict(
    request: Request, engine: EngineOf, name: DomainName, top: Top = 5
) -> schemas.Predicted:
    """Predict one image with a domain, or with the one that the server guesses (`auto`)."""
    start = engine.loop.time()
    image = await _read_image(request)
    result = await engine.predict(name, image, min(top, engine.limits.top))
    return _predicted(result, engine.loop.time() - start, request)


@router.post("/v1/predict", responses=PREDICT_ERRORS, openapi_extra=schemas.MANY_IMAGES)
async def predict_many(request: Request, engine: EngineOf, top: Top = 5) -> schemas.Answers:
    """Predict many images, one domain per image. Each gets a result or an error."""
    start, top = engine.loop.time(), min(top, engine.limits.top)
    images = await _read_images(request, engine.limits.images)
    if len(images) > engine.limits.images:
        raise _too_many(engine.limits.images)

    async def one(i: int, domain: str, image: bytes | None) -> schemas.Predicted | schemas.Failed:
        try:
            if image is None:
                raise RequestError("bad_image", f"image {i}: not valid base64")
            result = await engine.predict(domain, image, top, f"image {i}")
        except RequestError as error:
            engine.metrics.errors.labels(error.reason).inc()
            detail = schemas.Reason(reason=error.reason, message=error.message)
            return schemas.Failed(domain=domain[:64], error=detail)
        return _predicted(result, engine.loop.time() - start, request)

    items = await asyncio.gather(*(one(i, *pair) for i, pair in enumerate(images)))
    return schemas.Answers(items=items, request=request.state.request_id)


def _predicted(result: ImageResult, total: float, request: Request) -> schemas.Predicted:
    fields = {**vars(result), "seconds": {**result.seconds, "total": total}}
    return schemas.Predicted(**fields, request=request.state.request_id)


# ── reading requests ─────────────────────────────────────────────────────────────────────────


async def _read_image(request: Request) -> bytes:
    """Return the image of a request: its body, or the one file of its form."""
    media_type = _content_type(request)
    if media_type == FORM:
        async with _form(request, "image") as (_, files):
            if len(files) != 1:
                raise RequestError("invalid", "the form needs exactly one file named 'image'")
            return await files[0].read()
    raw = ("", "application/octet-stream")
    if media_type not in raw and not media_type.startswith("image/"):
        raise RequestError("media_type", f"send the image's bytes as image/*, or as {FORM}")
    return await request.body()


async def _read_images(request: Request, most: int) -> Sequence[tuple[str, bytes | None]]:
    """Return [(domain, image)] of a request; None for an image that is not valid base64."""
    media_type = _content_type(request)
    if media_type == FORM:
        async with _form(request, "image") as (form, files):
            names = [value for value in form.getlist("domain") if isinstance(value, str)]
            names = names * len(files) if len(names) == 1 else names
            if not files or len(names) != len(files):
                raise RequestError(
                    "invalid",
                    "the form needs 'image' files, and one 'domain' field per file or one for all",
                )
            return [(name, await file.read()) for name, file in zip(names, files, strict=True)]
    if media_type != "application/json":
        raise RequestError("media_type", f"send application/json or {FORM}")
    body = await request.body()
    # Checked before parsing, because a million tiny items would block the event loop for seconds.
    if sum(body.count(mark) for mark in MARKS) > MARKS_PER_ITEM * (most + 1):
        raise _too_many(most)
    try:
        items = schemas.Items.model_validate_json(body).items
    except ValidationError as error:
        raise invalid_input(error.errors()) from None
    return [(item.domain, _from_base64(item.image)) for item in items]


def invalid_input(errors: Sequence[Any]) -> RequestError:
    """Return the error for input that does not match its schema: the first of pydantic's."""
    place = ".".join(str(part) for part in errors[0]["loc"])
    return RequestError("invalid", f"{place or 'body'}: {errors[0]['msg']}")


def _too_many(most: int) -> RequestError:
    return RequestError("too_many", f"more than {most} images in one request. Send fewer.")


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


@contextlib.asynccontextmanager
async def _form(request: Request, field: str) -> AsyncIterator[tuple[FormData, list[UploadFile]]]:
    """Yield the form of a request, and its files in a field."""
    try:
        async with request.form(max_files=PARTS, max_fields=PARTS) as form:
            yield form, [value for value in form.getlist(field) if isinstance(value, UploadFile)]
    except HTTPException as error:
        raise RequestError("invalid", str(error.detail), status=400) from None


async def _save(folder: Path, upload: UploadFile) -> None:
    """Write an uploaded file into a folder, by its checked base name; its path is not trusted."""
    name = (upload.filename or "").replace("\\", "/")
    parent, _, base = name.rpartition("/")
    place = folder / "basis" if parent.rpartition("/")[2] == "basis" else folder
    if not _FILE.fullmatch(base):
        raise RequestError("invalid", f"file {name[:64]!r}: not a file name of a domain")
    place.mkdir(exist_ok=True)
    (place / base).write_bytes(await upload.read())
