"""The routes: HTTP in, the engine's answers out."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import fastapi
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..ecology import Ecology
from ..version import __version__
from . import schemas
from .engine import Answer, Engine
from .guard import Guard, Keys, error
from .limits import Limits
from .metrics import Metrics
from .refusals import Refused
from .schemas import NAME, refusals

PAGE = Path(__file__).with_name("page.html")
DomainName = Annotated[str, fastapi.Path(pattern=NAME, examples=["digits"])]
Top = Annotated[int, Query(ge=1, description="How many answers an image.")]
PREDICTING = refusals(404, 409, 415, 422, 429, 500, 503, 504)


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

    _handle_errors(app)
    _reading(app)
    _predicting(app, limits)
    if allow_writes:
        _writing(app)
    app.add_middleware(Guard, limits=limits, keys=keys, metrics=metrics)
    return app


def _id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request", ""))


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _handle_errors(app: FastAPI) -> None:
    async def refused(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, Refused)
        return error(exception, _id(request))

    async def invalid(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, RequestValidationError)
        first = exception.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return error(Refused(422, "invalid", f"{where}: {first['msg']}"), _id(request))

    async def plain(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, HTTPException)
        answer = error(Refused(exception.status_code, "http", exception.detail), _id(request))
        answer.headers.update(exception.headers or {})
        return answer

    async def gone(request: Request, _: Exception) -> Response:
        return error(Refused(400, "client_gone", "the client went away"), _id(request))

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(ClientDisconnect, gone)


# ── reading ──────────────────────────────────────────────────────────────────────────────────


def _reading(app: FastAPI) -> None:
    @app.get("/live", response_model=schemas.State, responses=refusals())
    async def live() -> dict[str, bool]:
        """The process answers."""
        return {"ok": True}

    @app.get("/ready", response_model=schemas.State, responses=refusals(503))
    async def ready(request: Request) -> dict[str, bool]:
        """A real forward pass succeeded lately in every worker."""
        if not _engine(request).ready:
            raise Refused(503, "not_ready", "a worker starts, hangs or is being replaced", 1.0)
        return {"ok": True}

    @app.get("/metrics", responses=refusals())
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        return Response(_engine(request).metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/domains", response_model=schemas.Domains, responses=refusals(409))
    async def domains(request: Request) -> dict[str, Any]:
        """Every domain of the store."""
        engine = _engine(request)
        rows = [
            {
                "domain": name,
                "method": entry.method,
                "classes": entry.classes,
                "accuracy": entry.accuracy,
                "parameters": entry.parameters,
                "bytes": entry.bytes,
                "basis": entry.basis,
                "resident": any(name in pool.residents.held for pool in engine.pools),
            }
            for name, entry in sorted(engine.ecology.domains.items())
        ]
        return {"domains": rows}

    @app.get("/v1/domains/{name}", response_model=schemas.Domain, responses=refusals(404, 409, 422))
    async def domain(request: Request, name: DomainName) -> dict[str, Any]:
        """One of them, with the names of its classes."""
        engine = _engine(request)
        held = any(name in pool.residents.held for pool in engine.pools)
        return {**engine.catalog.find(name).facts, "resident": held}

    @app.get("/v1/status", responses=refusals())
    async def status(request: Request) -> dict[str, Any]:
        """What the page shows: load, memory, workers."""
        return _engine(request).status()

    @app.get("/", response_class=HTMLResponse, responses=refusals())
    async def page() -> HTMLResponse:
        """For people."""
        safe = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        safe += "img-src data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none'"
        headers = {"Content-Security-Policy": safe, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)


# ── predicting ───────────────────────────────────────────────────────────────────────────────

_BODY = {
    "requestBody": {
        "required": True,
        "description": "An image file: its bytes, or a form with it as `image`.",
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image"],
                    "properties": {"image": {"type": "string", "format": "binary"}},
                }
            },
        },
    }
}
_BODIES = {
    "requestBody": {
        "required": True,
        "description": "JSON, or a form with as many `image` files as `domain` fields (or one).",
        "content": {
            "application/json": {"schema": schemas.Items.model_json_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image", "domain"],
                    "properties": {
                        "image": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                        },
                        "domain": {"type": "array", "items": {"type": "string"}},
                    },
                }
            },
        },
    }
}


def _predicting(app: FastAPI, limits: Limits) -> None:
    @app.post(
        "/v1/domains/{name}/predict",
        response_model=schemas.Predicted,
        responses=PREDICTING,
        openapi_extra=_BODY,
    )
    async def predict(request: Request, name: DomainName, top: Top = 5) -> dict[str, Any]:
        """The domain's answer to one image; `auto` lets the server name the domain."""
        engine, start = _engine(request), asyncio.get_running_loop().time()
        image, called = await _image(request)
        answer = await engine.ask(name, image, min(top, limits.top), called)
        total = engine.loop.time() - start
        return _predicted(answer, total, _id(request))

    @app.post(
        "/v1/predict",
        response_model=schemas.Answers,
        responses=PREDICTING,
        openapi_extra=_BODIES,
    )
    async def predict_many(request: Request, top: Top = 5) -> dict[str, Any]:
        """Many images, each of its own domain: an answer for each, or why there is none."""
        engine, start = _engine(request), asyncio.get_running_loop().time()
        items = await _images(request)
        if len(items) > limits.images:
            raise Refused(413, "too_many", f"a request has at most {limits.images} images")

        async def one(place: int, domain: str, image: bytes | Refused) -> dict[str, Any]:
            if isinstance(image, Refused):
                raise image
            answer = await engine.ask(domain, image, min(top, limits.top), f"image {place}")
            return _predicted(answer, engine.loop.time() - start, _id(request))

        works = [one(i, domain, image) for i, (domain, image) in enumerate(items)]
        found = await asyncio.gather(*works, return_exceptions=True)
        answers: list[dict[str, Any]] = []
        for (domain, _), answer in zip(items, found, strict=True):
            if isinstance(answer, Refused):
                reason = {"reason": answer.reason, "message": answer.message}
                answers.append({"domain": domain, "error": reason})
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append(answer)
        return {"items": answers, "request": _id(request)}


def _predicted(answer: Answer, total: float, request: str) -> dict[str, Any]:
    facts = answer.facts
    return {
        "domain": answer.domain,
        "predictions": [{"label": name, "probability": p} for name, p in answer.top],
        "batch": {"images": facts["batch"], "domains": facts["domains"]},
        "seconds": {"queue": facts["queued"], "compute": facts["computed"], "total": total},
        "confidence": facts.get("confidence"),
        "candidates": facts.get("candidates"),
        "request": request,
    }


async def _image(request: Request) -> tuple[bytes, str]:
    """The one image of a request, and what errors call it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with _form(request) as form:
            files = [f for f in form.getlist("image") if isinstance(f, UploadFile)]
            if len(files) != 1:
                raise Refused(422, "invalid", "the form needs one file named 'image'")
            return await files[0].read(), "image"
    if kind and kind != "application/octet-stream" and not kind.startswith("image/"):
        raise Refused(415, "media_type", "send the image's bytes as image/*, or a form")
    return await request.body(), "image"


async def _images(request: Request) -> Sequence[tuple[str, bytes | Refused]]:
    """[(domain, image)]; an item that cannot be read fails alone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with _form(request) as form:
            files = [f for f in form.getlist("image") if isinstance(f, UploadFile)]
            names = [str(n) for n in form.getlist("domain") if not isinstance(n, UploadFile)]
            names = names * len(files) if len(names) == 1 else names
            if not files or len(names) != len(files):
                raise Refused(
                    422,
                    "invalid",
                    "the form needs 'image' files and as many 'domain' fields, or one",
                )
            return [(n, await f.read()) for n, f in zip(names, files, strict=True)]
    if kind != "application/json":
        raise Refused(415, "media_type", "send application/json or multipart/form-data")
    try:
        items = schemas.Items.model_validate_json(await request.body()).items
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(422, "invalid", f"{where or 'body'}: {first['msg']}") from None
    return [(item.domain, _from_base64(item.image)) for item in items]


def _from_base64(text: str) -> bytes | Refused:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return Refused(422, "bad_image", "image: is no base64")


@contextlib.asynccontextmanager
async def _form(request: Request) -> AsyncIterator[Any]:
    try:
        async with request.form(max_files=256, max_fields=256) as form:
            yield form
    except HTTPException as broken:
        raise Refused(400, "invalid", str(broken.detail)) from None


# ── writing ──────────────────────────────────────────────────────────────────────────────────


def _writing(app: FastAPI) -> None:
    @app.put(
        "/v1/domains/{name}",
        status_code=201,
        response_model=schemas.Domain,
        responses=refusals(404, 409, 415, 422, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": "The files of `covnorm export --to domain`, each as `file`.",
                "content": {
                    "multipart/form-data": {
                        "schema": {
                            "type": "object",
                            "required": ["file"],
                            "properties": {
                                "file": {
                                    "type": "array",
                                    "items": {"type": "string", "format": "binary"},
                                }
                            },
                        }
                    }
                },
            }
        },
    )
    async def put(request: Request, name: DomainName, replace: bool = False) -> dict[str, Any]:
        """Keep an uploaded domain; it is served from now on."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise Refused(415, "media_type", "send the domain's files as a form")
        engine = _engine(request)
        with tempfile.TemporaryDirectory() as folder:
            async with _form(request) as form:
                for part in form.getlist("file"):
                    if isinstance(part, UploadFile):
                        await _keep(Path(folder), part)
            await engine.keep(name, folder, replace)
        return engine.catalog.find(name).facts

    @app.delete("/v1/domains/{name}", status_code=204, responses=refusals(404, 409, 422))
    async def delete(request: Request, name: DomainName) -> None:
        """Forget a domain."""
        engine = _engine(request)
        engine.catalog.find(name)
        await asyncio.to_thread(engine.ecology.remove, [name])


async def _keep(folder: Path, part: UploadFile) -> None:
    """One file of an upload, under the plain name that it must have; never where it says."""
    name = (part.filename or "").replace("\\", "/")
    place, _, plain = name.rpartition("/")
    inside = "basis" if place.rpartition("/")[2] == "basis" else "."
    if not plain or not plain.replace("-", "").replace(".", "").replace("_", "").isalnum():
        raise Refused(422, "invalid", f"file {name!r}: not the name of a domain's file")
    (folder / inside).mkdir(exist_ok=True)
    (folder / inside / plain).write_bytes(await part.read())
