"""What stands before every route: a request's id, its key, size and time, its line in the log."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .keys import Keys
from .limits import Limits
from .log import LOG
from .metrics import Metrics
from .refusals import Refused

OPEN = {"/live"}  # asks for no key
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LENGTH = re.compile(r"[0-9]{1,18}")


def error(refused: Refused, request: str, metrics: Metrics) -> JSONResponse:
    """A refusal as every route answers it; it is counted by its reason."""
    metrics.errors.labels(refused.reason).inc()
    body = {"error": {"reason": refused.reason, "message": refused.message}, "request": request}
    headers = {}
    if refused.retry is not None:
        headers["Retry-After"] = str(max(1, round(refused.retry)))
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="covnorm", charset="UTF-8"'
    if refused.status == 408:  # the rest of the body is not waited for
        headers["Connection"] = "close"
    return JSONResponse(body, refused.status, headers)


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self, app: ASGIApp, limits: Limits, keys: Keys, metrics: Callable[[], Metrics]
    ) -> None:
        self.app, self.limits, self.keys, self.metrics = app, limits, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, refused or passed on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.perf_counter()
        asked = headers.get("x-request-id", "")
        request = asked if _ID.fullmatch(asked) else secrets.token_hex(8)
        scope.setdefault("state", {})["request"] = request
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request
            await send(message)

        try:
            if (refusal := self._refusal(scope["path"], headers)) is not None:
                raise refusal
            await self.app(scope, self._limited(receive), sending)
        except Refused as refused:
            await error(refused, request, self.metrics())(scope, receive, sending)
        except Exception:
            LOG.exception("failed", extra={"said": {"request": request}})
            if status:
                raise
            told = Refused(500, "internal", f"a fault of ours: the log has it under {request}")
            await error(told, request, self.metrics())(scope, receive, sending)
        finally:
            self._tell(scope, request, status, time.perf_counter() - start)

    def _refusal(self, path: str, headers: Headers) -> Refused | None:
        if path not in OPEN and not self.keys.open(headers):
            return Refused(401, "no_key", "give a key: Authorization: Bearer KEY")
        length = headers.get("content-length", "0")
        if not _LENGTH.fullmatch(length) or int(length) > self.limits.body:
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
        self.metrics().requests.labels(route, str(status)).inc()
        said = {"request": request, "method": scope["method"], "route": route, "status": status}
        LOG.info("request", extra={"said": {**said, "seconds": round(seconds, 4)}})


def _too_large(most: int) -> Refused:
    return Refused(413, "too_large", f"a body has at most {most:,} bytes: send fewer or smaller")
