"""`serve`: the ecology over HTTP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CovNormError
from .options import WHERE, Json, find

LOGS = ("text", "json")


def serve(
    folder: Annotated[
        Path | None, typer.Argument(metavar="ECOLOGY", show_default=False, help=WHERE)
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compute.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="Of each; 0: as torch likes.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images of one forward pass.")] = 16,
    wait: Annotated[
        float, typer.Option(min=0, help="Milliseconds that an image waits for company.")
    ] = 4,
    mixed: Annotated[
        bool, typer.Option("--mixed/--no-mixed", help="Whether domains share a pass.")
    ] = True,
    queue: Annotated[
        int, typer.Option(min=1, help="Images that may wait; more get 429 at once.")
    ] = 256,
    deadline: Annotated[
        float, typer.Option(min=0.001, help="Seconds that an answer may take, else 504.")
    ] = 2,
    resident: Annotated[
        float, typer.Option(min=0.001, help="Megabytes of domains in memory, a worker.")
    ] = 2000,
    pin: Annotated[
        list[str] | None,
        typer.Option(help="A domain to keep in memory from the start.", show_default=False),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="A file with a key a line; without it, all may ask.", show_default=False),
    ] = None,
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Let clients put and delete domains.")
    ] = False,
    logs: Annotated[str, typer.Option(help="On stderr: text or json.")] = "text",
    json: Json = False,
) -> None:
    """Answer images over HTTP, each by its own domain; a page for people is at /.

    covnorm serve house

    curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg'
    localhost:8080/v1/domains/flowers/predict

    Domains that are added or removed meanwhile are followed within a second. Ctrl-C or SIGTERM
    stop it once the requests under way are answered.
    """
    if logs not in LOGS:
        raise CovNormError(f"--logs {logs}: choose {' or '.join(LOGS)}")
    if not math.isfinite(resident):
        raise CovNormError(f"--resident {resident}: give a number of megabytes")
    try:
        from ..serve.server import Keys, Limits, print_address
        from ..serve.server import serve as run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("torch_covnorm"):
            raise
        raise CovNormError(
            f"serving needs {error.name}: pip install 'torch-covnorm[serve]'"
        ) from None
    limits = Limits(
        workers=workers,
        threads=threads,
        batch=batch,
        wait=wait / 1000,
        mixed=mixed,
        queue=queue,
        deadline=deadline,
        resident=int(resident * 1e6),
        pins=tuple(pin or ()),
    )
    run(
        find(folder),
        host=host,
        port=port,
        limits=limits,
        keys=Keys.read(keys),
        allow_writes=allow_writes,
        json_logs=logs == "json",
        on_listening=print_address if json else None,
    )
