"""What goes in and comes out over HTTP, as OpenAPI shows it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
# 8 × 8 pixels of grey as PNG: smaller ones are not read.
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAEElEQVR42mNsYIAAJgaKGAAmCACQtTEKkQAAAABJRU5E"
    "rkJggg=="
)


class Prediction(BaseModel):
    """A label with its probability."""

    label: str
    probability: float = Field(ge=0, le=1)


class Batch(BaseModel):
    """The batch that the image rode in."""

    images: int
    domains: int


class Seconds(BaseModel):
    """Where the time went."""

    queue: float
    compute: float
    total: float


class Predicted(BaseModel):
    """The answer to one image, best first. `confidence`: of the domain, where it was guessed."""

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
    """Why there is no answer: a word that does not change, and a sentence with the remedy."""

    reason: str
    message: str


class Error(BaseModel):
    """A refusal."""

    error: Reason
    request: str


class Item(BaseModel):
    """An image of many, with its domain or "auto"."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"domain": "digits", "image": PICTURE}}
    )
    domain: str = Field(pattern=NAME)
    image: str = Field(description="The image file, in base64.")


class Items(BaseModel):
    """Many images, of any domains."""

    model_config = ConfigDict(extra="forbid")
    items: list[Item] = Field(min_length=1)


class Failed(BaseModel):
    """An image of many that got no answer; the others did."""

    domain: str
    error: Reason


class Answers(BaseModel):
    """One answer for each item, in their order."""

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
    """All of them."""

    domains: list[Domain]


class State(BaseModel):
    """Whether it lives, or is ready."""

    ok: bool


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that are no answer; every route may meet these four."""
    return {status: {"model": Error} for status in (400, 401, 408, 413, *statuses)}


def _binary() -> dict[str, Any]:
    return {"type": "string", "format": "binary"}


def _form(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"schema": {"type": "object", "required": list(fields), "properties": fields}}


def _body(about: str, **kinds: dict[str, Any]) -> dict[str, Any]:
    """What a route reads by itself, as OpenAPI shows it."""
    return {"requestBody": {"required": True, "description": about, "content": kinds}}


def _items() -> dict[str, Any]:
    """The schema of `Items` with that of `Item` in its place: a reference would lead nowhere."""
    schema = Items.model_json_schema()
    schema["properties"]["items"]["items"] = schema.pop("$defs")["Item"]
    return schema


ONE_IMAGE = _body(
    "An image file: its bytes, or a form with it as `image`.",
    **{
        "image/*": {"schema": _binary()},
        "application/octet-stream": {"schema": _binary()},
        "multipart/form-data": _form(image=_binary()),
    },
)
MANY_IMAGES = _body(
    "JSON, or a form with as many `image` files as `domain` fields (or one).",
    **{
        "application/json": {"schema": _items()},
        "multipart/form-data": _form(
            image={"type": "array", "items": _binary()},
            domain={"type": "array", "items": {"type": "string"}},
        ),
    },
)
DOMAIN_FILES = _body(
    "The files of `covnorm export --to domain`, each as `file`.",
    **{"multipart/form-data": _form(file={"type": "array", "items": _binary()})},
)
