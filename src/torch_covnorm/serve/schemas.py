"""The JSON bodies of requests and responses, as OpenAPI describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
# A gray PNG of 8 × 8 pixels, the smallest that is accepted.
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAEElEQVR42mNsYIAAJgaKGAAmCACQtTEKkQAAAABJRU5E"
    "rkJggg=="
)


class Prediction(BaseModel):
    """A label with its probability."""

    label: str
    probability: float = Field(ge=0, le=1)


class Batch(BaseModel):
    """The batch that the image was part of."""

    images: int
    domains: int


class Seconds(BaseModel):
    """Seconds spent in the queue, in the network, and in total."""

    queue: float
    compute: float
    total: float


class Predicted(BaseModel):
    """The predictions for one image, best first. `confidence` is that of a guessed domain."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "domain": "digits",
                "predictions": [{"label": "7", "probability": 0.98}],
                "batch": {"images": 5, "domains": 3},
                "seconds": {"queue": 0.003, "compute": 0.021, "total": 0.027},
                "confidence": None,
                "request": "5f0c1d2e3a4b5c6d",
            }
        }
    )
    domain: str
    predictions: list[Prediction]
    batch: Batch
    seconds: Seconds
    confidence: float | None = None
    candidates: list[dict[str, Any]] | None = None
    request: str


class Reason(BaseModel):
    """Why there is no result: a fixed word for programs, and a message for people."""

    reason: str
    message: str


class Error(BaseModel):
    """The body of every error response."""

    error: Reason
    request: str


class Item(BaseModel):
    """One image with its domain, or "auto"."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"domain": "digits", "image": PICTURE}}
    )
    domain: str = Field(pattern=NAME)
    image: str = Field(description="The image file, in base64.")


class Items(BaseModel):
    """Many images, each with its domain."""

    model_config = ConfigDict(extra="forbid")
    items: list[Item] = Field(min_length=1)


class Failed(BaseModel):
    """An image without a result. The other images of the request are not affected."""

    domain: str
    error: Reason


class Answers(BaseModel):
    """One result or error per item, in the order of the request."""

    items: list[Predicted | Failed]
    request: str


class Domain(BaseModel):
    """A domain of the store."""

    domain: str
    method: str
    classes: list[str] | int | None
    accuracy: float | None
    parameters: int
    bytes: int
    basis: str | None = None
    size: int | None = None
    resident: bool = False


class Domains(BaseModel):
    """Every domain of the store."""

    domains: list[Domain]


class State(BaseModel):
    """Whether the server is live or ready."""

    ok: bool


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route: these, and the four that every route has."""
    return {status: {"model": Error} for status in (400, 401, 408, 413, *statuses)}


def text_response(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route that sends text, and JSON for errors."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}, **error_responses()}


BINARY = {"type": "string", "format": "binary"}


def _form(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"schema": {"type": "object", "required": list(fields), "properties": fields}}


def _body(description: str, content: dict[str, Any]) -> dict[str, Any]:
    """Describe a request body that its route reads without FastAPI's help."""
    return {"requestBody": {"required": True, "description": description, "content": content}}


# `Item` is inlined, because `$defs` would not be found there.
ITEMS = Items.model_json_schema()
ITEMS["properties"]["items"]["items"] = ITEMS.pop("$defs")["Item"]
ONE_IMAGE = _body(
    "An image file: its bytes, or a form with the file `image`.",
    {
        "image/*": {"schema": BINARY},
        "application/octet-stream": {"schema": BINARY},
        "multipart/form-data": _form(image=BINARY),
    },
)
MANY_IMAGES = _body(
    "JSON, or a form with `image` files and one `domain` field per file or one for all.",
    {
        "application/json": {"schema": ITEMS},
        "multipart/form-data": _form(
            image={"type": "array", "items": BINARY},
            domain={"type": "array", "items": {"type": "string"}},
        ),
    },
)
DOMAIN_FILES = _body(
    "The files that `covnorm export --to domain` wrote, each as `file`.",
    {"multipart/form-data": _form(file={"type": "array", "items": BINARY})},
)
