"""The middleware around every route: request id, key, size and time of the body, errors, log."""

from __future__ import annotations

import asyncio
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import RequestError
from .keys import Keys
from .limits import Limits
from .log import LOG

OPEN = {"/live"}  # needs no key
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LENGTH = re.compile(r"[0-9]{1,18}")


def error_response(error: RequestError, scope: Scope) -> JSONResponse:
    """Return an error as every route sends it, and count it by its reason."""
    scope["app"].state.engine.metrics.errors.labels(error.reason).inc()
    headers = {}
    if error.retry is not None:
        headers["Retry-After"] = str(max(1, round(error.retry)))
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="covnorm", charset="UTF-8"'
    if error.status == 408:  # the rest of the body is not read
        headers["Connection"] = "close"
    detail = {"reason": error.reason, "message": error.message}
    body = {"error": detail, "request": scope["state"]["request_id"]}
    return JSONResponse(body, error.status, headers)


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, limits: Limits, keys: Keys) -> None:
        self.app, self.limits, self.keys = app, limits, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on; turn what fails into an error response."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        async def send_error(error: RequestError) -> None:
            await error_response(error, scope)(scope, receive, send_with_id)

        try:
            self._check(scope["path"], headers)
            await self.app(scope, self._limited(receive), send_with_id)
        except RequestError as error:
            await send_error(error)
        except ClientDisconnect:
            await send_error(RequestError("client_gone", "the client disconnected"))
        except Exception:
            LOG.exception("failed", extra={"fields": {"request": request_id}})
            if status:
                raise
            message = f"internal error. The server's log has details under {request_id}."
            await send_error(RequestError("internal", message))
        finally:
            route = getattr(scope.get("route"), "path", "other")
            scope["app"].state.engine.metrics.requests.labels(route, str(status)).inc()
            seconds = round(time.perf_counter() - start, 4)
            fields = {"request": request_id, "method": scope["method"], "route": route}
            LOG.info("request", extra={"fields": {**fields, "status": status, "seconds": seconds}})

    def _check(self, path: str, headers: Headers) -> None:
        if path not in OPEN and not self.keys.allow(headers):
            raise RequestError("no_key", "missing or wrong key. Send Authorization: Bearer KEY.")
        length = headers.get("content-length", "0")
        if not _LENGTH.fullmatch(length) or int(length) > self.limits.body:
            raise self._too_large()

    def _too_large(self) -> RequestError:
        text = f"the body has more than {self.limits.body:,} bytes. Send fewer or smaller images."
        return RequestError("too_large", text)

    def _limited(self, receive: Receive) -> Receive:
        """Return `receive` with a limit on the bytes and on the time of the whole body."""
        size, complete = 0, False
        until = asyncio.get_running_loop().time() + self.limits.upload

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()  # only a disconnect can follow
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {self.limits.upload:g} s"
                raise RequestError("slow", text) from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self.limits.body:
                raise self._too_large()
            return message

        return limited
