"""What stands before every route: a request's id, its key, size and time, its line in the log."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import CovNormError
from ..records import blame
from .limits import Limits
from .metrics import Metrics
from .refusals import Refused

LOG = logging.getLogger("torch_covnorm.serve")
OPEN = {"/live"}  # asks for no key
_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


class Keys:
    """The keys that open the server; none: it is open. Compared in constant time, as digests."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [self._digest(key) for key in keys]

    @classmethod
    def read(cls, file: Path | None) -> Keys:
        """One key a line; empty lines and those that begin with # are none."""
        if file is None:
            return cls()
        with blame(file):
            lines = [line.strip() for line in file.read_text().splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise CovNormError(f"{file}: holds no key: write one a line")
        if short := [key for key in keys if len(key) < 16]:
            raise CovNormError(
                f"{file}: a key of {len(short[0])} characters can be guessed: take 16 or more"
            )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def open(self, headers: Headers) -> bool:
        """Whether a request may come in: Bearer, X-API-Key, or Basic with the key as password."""
        given = self._digest(_given(headers))
        found = False
        for digest in self._digests:  # all of them, so that time tells nothing
            found |= hmac.compare_digest(digest, given)
        return found or not self._digests

    @staticmethod
    def _digest(key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _given(headers: Headers) -> str:
    if key := headers.get("x-api-key"):
        return key
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
    return ""


def error(refused: Refused, request: str) -> JSONResponse:
    """A refusal as every route answers it."""
    body = {"error": {"reason": refused.reason, "message": refused.message}, "request": request}
    headers = {}
    if refused.retry is not None:
        headers["Retry-After"] = str(max(1, round(refused.retry)))
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="covnorm", charset="UTF-8"'
    return JSONResponse(body, refused.status, headers)


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, limits: Limits, keys: Keys, metrics: Any) -> None:
        self.app, self.limits, self.keys, self.metrics = app, limits, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, refused or passed on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.perf_counter()
        asked = headers.get("x-request-id", "")
        request = asked if _ID.match(asked) else secrets.token_hex(8)
        scope.setdefault("state", {})["request"] = request
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await error(refusal, request)(scope, receive, sending)
            else:
                await self.app(scope, self._limited(receive), sending)
        except Refused as refused:  # from the body, before any route saw it
            await error(refused, request)(scope, receive, sending)
        finally:
            self._tell(scope, request, status, time.perf_counter() - start)

    def _refusal(self, path: str, headers: Headers) -> Refused | None:
        if path not in OPEN and not self.keys.open(headers):
            return Refused(401, "no_key", "give a key: Authorization: Bearer KEY")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.limits.body:
            return _too_large(self.limits.body)
        return None

    def _limited(self, receive: Receive) -> Receive:
        """The body, no larger and no slower than allowed."""
        taken, whole = 0, False
        until = time.monotonic() + self.limits.upload

        async def limited() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()  # only the client's going can come now
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                seconds = self.limits.upload
                raise Refused(408, "slow", f"no whole body within {seconds:g} s") from None
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > self.limits.body:
                raise _too_large(self.limits.body)
            return message

        return limited

    def _tell(self, scope: Scope, request: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        metrics: Metrics = self.metrics()
        metrics.requests.labels(route, str(status)).inc()
        said = {"request": request, "method": scope["method"], "route": route, "status": status}
        LOG.info("request", extra={"said": {**said, "seconds": round(seconds, 4)}})


def _too_large(most: int) -> Refused:
    return Refused(413, "too_large", f"a body has at most {most:,} bytes: send fewer or smaller")


class Lines(logging.Formatter):
    """Log lines for people, or for machines: one JSON object each."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, Any] = getattr(record, "said", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp = f"{when}.{int(record.msecs):03}Z"
        if record.exc_info:
            said = {**said, "error": self.formatException(record.exc_info).replace("\n", " | ")}
        if self.as_json:
            whole = {"time": stamp, "level": record.levelname.lower()}
            return json.dumps({**whole, "event": record.getMessage(), **said})
        rest = " ".join(f"{key}={value}" for key, value in said.items())
        return f"{stamp} {record.levelname.lower():7} {record.getMessage()} {rest}".rstrip()


def log_to_stderr(as_json: bool) -> None:
    """Send the server's lines, and those of what it stands on, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json))
    for name, level in (("torch_covnorm.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
