"""Routes that only look: whether it lives, what it counts, which domains there are, the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from . import schemas
from .refusals import Refused
from .requests import DomainName, engine_of
from .schemas import refusals

PAGE = Path(__file__).with_name("page.html")


def add_routes(app: FastAPI) -> None:
    """To the application."""

    @app.get("/live", response_model=schemas.State, responses=refusals())
    async def live() -> dict[str, bool]:
        """The process answers."""
        return {"ok": True}

    @app.get("/ready", response_model=schemas.State, responses=refusals(503))
    async def ready(request: Request) -> dict[str, bool]:
        """A real forward pass succeeded lately in every worker."""
        if not engine_of(request).ready:
            raise Refused(503, "not_ready", "a worker starts, hangs or is being replaced", 1.0)
        return {"ok": True}

    @app.get("/metrics", response_class=Response, responses=_text("text/plain"))
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        return Response(engine_of(request).metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/domains", response_model=schemas.Domains, responses=refusals())
    async def domains(request: Request) -> dict[str, Any]:
        """Every domain of the store."""
        engine = engine_of(request)
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
            for name, entry in sorted(engine.catalog.entries().items())
        ]
        return {"domains": rows}

    @app.get("/v1/domains/{name}", response_model=schemas.Domain, responses=refusals(404, 409, 422))
    async def domain(request: Request, name: DomainName) -> dict[str, Any]:
        """One of them, with the names of its classes."""
        engine = engine_of(request)
        held = any(name in pool.residents.held for pool in engine.pools)
        return {**engine.catalog.find(name).facts, "resident": held}

    @app.get("/v1/status", responses=refusals())
    async def status(request: Request) -> dict[str, Any]:
        """What the page shows: load, memory, workers."""
        return engine_of(request).status()

    @app.get("/", response_class=Response, responses=_text("text/html"))
    async def page() -> Response:
        """For people."""
        safe = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        safe += "img-src data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none'"
        headers = {"Content-Security-Policy": safe, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)


def _text(kind: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a route whose answer is text, though a refusal is JSON."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}, **refusals()}
