"""Routes that answer images: one of a domain, or many of any domains."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from . import schemas
from .engine import Answer
from .limits import Limits
from .refusals import Refused, bad_image, invalid, too_many
from .requests import DomainName, engine_of, form_of, id_of, kind_of
from .schemas import refusals

Top = Annotated[int, Query(ge=1, description="How many answers an image.")]
PREDICTING = refusals(404, 409, 415, 422, 429, 500, 503, 504)
MARKS, MARKS_AN_ITEM = (b"{", b"[", b",", b'"'), 32  # of JSON; an item has a dozen


def add_routes(app: FastAPI, limits: Limits) -> None:
    """To the application."""

    @app.post(
        "/v1/domains/{name}/predict",
        response_model=schemas.Predicted,
        responses=PREDICTING,
        openapi_extra=schemas.ONE_IMAGE,
    )
    async def predict(request: Request, name: DomainName, top: Top = 5) -> dict[str, Any]:
        """The domain's answer to one image; `auto` lets the server name the domain."""
        engine, start = engine_of(request), asyncio.get_running_loop().time()
        image = await _image(request)
        answer = await engine.ask(name, image, min(top, limits.top))
        return _predicted(answer, engine.loop.time() - start, id_of(request))

    @app.post(
        "/v1/predict",
        response_model=schemas.Answers,
        responses=PREDICTING,
        openapi_extra=schemas.MANY_IMAGES,
    )
    async def predict_many(request: Request, top: Top = 5) -> dict[str, Any]:
        """Many images, each of its own domain: an answer for each, or why there is none."""
        engine, start = engine_of(request), asyncio.get_running_loop().time()
        items = await _images(request, limits.images)
        if len(items) > limits.images:
            raise too_many(limits.images)

        async def one(place: int, domain: str, image: bytes | Refused) -> dict[str, Any]:
            if isinstance(image, Refused):
                raise image
            answer = await engine.ask(domain, image, min(top, limits.top), f"image {place}")
            return _predicted(answer, engine.loop.time() - start, id_of(request))

        works = [one(i, domain, image) for i, (domain, image) in enumerate(items)]
        found = await asyncio.gather(*works, return_exceptions=True)
        answers: list[dict[str, Any]] = []
        for (domain, _), answer in zip(items, found, strict=True):
            if isinstance(answer, Refused):
                engine.metrics.errors.labels(answer.reason).inc()
                reason = {"reason": answer.reason, "message": answer.message}
                answers.append({"domain": domain[:64], "error": reason})
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append(answer)
        return {"items": answers, "request": id_of(request)}


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


async def _image(request: Request) -> bytes:
    """The one image of a request."""
    kind = kind_of(request)
    if kind == "multipart/form-data":
        async with form_of(request) as form:
            files = [f for f in form.getlist("image") if isinstance(f, UploadFile)]
            if len(files) != 1:
                raise invalid("the form needs one file named 'image'")
            return await files[0].read()
    if kind and kind != "application/octet-stream" and not kind.startswith("image/"):
        raise Refused(415, "media_type", "send the image's bytes as image/*, or a form")
    return await request.body()


async def _images(request: Request, most: int) -> Sequence[tuple[str, bytes | Refused]]:
    """[(domain, image)]; an item that cannot be read fails alone."""
    kind = kind_of(request)
    if kind == "multipart/form-data":
        async with form_of(request) as form:
            files = [f for f in form.getlist("image") if isinstance(f, UploadFile)]
            names = [str(n) for n in form.getlist("domain") if not isinstance(n, UploadFile)]
            names = names * len(files) if len(names) == 1 else names
            if not files or len(names) != len(files):
                raise invalid("the form needs 'image' files and as many 'domain' fields, or one")
            return [(n, await f.read()) for n, f in zip(names, files, strict=True)]
    if kind != "application/json":
        raise Refused(415, "media_type", "send application/json or multipart/form-data")
    body = await request.body()
    if sum(body.count(mark) for mark in MARKS) > MARKS_AN_ITEM * (most + 1):
        raise too_many(most)  # before it is parsed: a million small things would take seconds
    try:
        items = schemas.Items.model_validate_json(body).items
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise invalid(f"{where or 'body'}: {first['msg']}") from None
    return [(item.domain, _from_base64(item.image)) for item in items]


def _from_base64(text: str) -> bytes | Refused:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return bad_image("image: is no base64")
