"""`serve`: the command that serves an ecology over HTTP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ..ecology import Ecology
from ..errors import CovNormError
from .options import ECOLOGY_HELP, TrustCode, ecology_folder, panel

LOGS = ("text", "json")
address, batching, limit = panel("Address"), panel("Workers and batches"), panel("Limits")
access, log = panel("Access"), panel("Logs")


def serve(
    folder: Annotated[Path | None, typer.Argument(metavar="ECOLOGY", help=ECOLOGY_HELP)] = None,
    host: Annotated[str, address("Address; 0.0.0.0 listens on every interface.")] = "127.0.0.1",
    port: Annotated[int, address("Port; 0 picks a free one.", min=0, max=65535)] = 8080,
    workers: Annotated[int, batching("Number of worker processes.", min=1)] = 1,
    threads: Annotated[
        int, batching("CPU threads per worker; 0: its share of the CPUs.", min=0)
    ] = 0,
    batch: Annotated[int, batching("Most images per forward pass.", min=1)] = 16,
    wait: Annotated[float, batching("Milliseconds to wait for a batch to fill.", min=0)] = 4,
    mixed: Annotated[
        bool, batching("Whether a batch may contain several domains.", "--mixed/--no-mixed")
    ] = True,
    queue: Annotated[
        int, limit("Images that may wait; further requests get status 429.", min=1)
    ] = 256,
    deadline: Annotated[float, limit("Seconds until a request gets status 504.", min=0.001)] = 2,
    resident: Annotated[
        float, limit("Megabytes of domains that a worker keeps in memory.", min=0.001)
    ] = 2000,
    pin: Annotated[
        list[str] | None, limit("Domain to keep in memory from the start. Repeat for several.")
    ] = None,
    keys: Annotated[
        Path | None, access("File with one API key per line. Default: no key is needed.")
    ] = None,
    allow_writes: Annotated[
        bool, access("Let clients upload and delete domains.", "--allow-writes")
    ] = False,
    trust_code: TrustCode = False,
    logs: Annotated[str, log("Format of the log on stderr: text or json.")] = "text",
    json: Annotated[bool, address("Print the address as JSON on stdout.", "--json")] = False,
) -> None:
    """Serve the domains over HTTP, with a web page at /.

    covnorm serve house

    curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg'
    localhost:8080/v1/domains/flowers/predict

    Domains that are added or removed while it runs are picked up within a second. Ctrl-C or
    SIGTERM stops it after the pending requests are answered.
    """
    if logs not in LOGS:
        raise CovNormError(f"--logs {logs}: choose {' or '.join(LOGS)}")
    if not math.isfinite(resident):
        raise CovNormError(f"--resident {resident}: expected a finite number of megabytes")
    try:
        from ..serve.server import Keys, Limits, print_address
        from ..serve.server import serve as run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("torch_covnorm"):
            raise
        raise CovNormError(
            f"covnorm serve needs the package {error.name}: pip install 'torch-covnorm[serve]'"
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
        Ecology(ecology_folder(folder), trust_code),
        host=host,
        port=port,
        limits=limits,
        keys=Keys.read(keys),
        allow_writes=allow_writes,
        json_logs=logs == "json",
        on_listening=print_address if json else None,
    )
