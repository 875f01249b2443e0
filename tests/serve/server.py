"""A real server in a separate process, called over real sockets and always ended."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 90.0  # seconds for what takes one second on an idle machine


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        """Return the reason of an error."""
        return str(self.json["error"]["reason"])

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])

    @property
    def best(self) -> tuple[str, float]:
        first = self.json["predictions"][0]
        return first["label"], first["probability"]


class Server:
    """`covnorm serve FOLDER`, listening. `limits`: settings that the command has no option for."""

    def __init__(
        self, folder: Path, *options: object, limits: dict[str, Any] | None = None
    ) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        if limits is None:
            words = ["-m", "torch_covnorm", "serve", folder, "--port", 0, "--json"]
            words += ["--logs", "json", "--threads", 1, *options]
        else:
            assert not options
            words = [__file__, folder, json.dumps({"threads": 1, **limits})]
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=self.log
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(PATIENCE)
            log = self.log_text()
            self.kill()
            raise AssertionError(f"the server did not start: {log}")
        self.address = json.loads(line)["address"]
        place = urllib.parse.urlsplit(self.address)
        assert place.hostname is not None
        self.host, self.port = place.hostname, place.port

    def log_text(self) -> str:
        """Return the whole log."""
        return os.pread(self.log.fileno(), 10_000_000, 0).decode()

    def lines(self) -> list[dict[str, Any]]:
        """Return the log, one dictionary per line."""
        return [json.loads(line) for line in self.log_text().splitlines()]

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def connect(self, timeout: float = PATIENCE) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = PATIENCE,
    ) -> Response:
        """Send one request on a new connection."""
        connection = self.connect(timeout)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Response:
        return self.ask("GET", path, headers=headers)

    def predict(self, domain: str, image: bytes, top: int | None = None, **rest: Any) -> Response:
        """Predict one image, sent as its bytes."""
        path = f"/v1/domains/{domain}/predict" + ("" if top is None else f"?top={top}")
        headers = {"Content-Type": "application/octet-stream", **rest.pop("headers", {})}
        return self.ask("POST", path, image, headers, **rest)

    def many(self, items: list[tuple[str, bytes]], top: int = 100, **rest: Any) -> Response:
        """Predict images of many domains in one request."""
        listed = [{"domain": d, "image": base64.b64encode(i).decode()} for d, i in items]
        headers = {"Content-Type": "application/json"}
        body = json.dumps({"items": listed}).encode()
        return self.ask("POST", f"/v1/predict?top={top}", body, headers, **rest)

    def upload(self, name: str, files: dict[str, bytes], replace: bool = False) -> Response:
        """Upload a domain."""
        body, headers = form([("file", file, content) for file, content in files.items()])
        path = f"/v1/domains/{name}" + "?replace=true" * replace
        return self.ask("PUT", path, body, headers)

    def metrics(self) -> dict[str, float]:
        """Return {series: value}."""
        found = {}
        for line in self.get("/metrics").body.decode().splitlines():
            if not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                found[series] = float(value)
        return found

    def metric(self, series: str) -> float:
        return self.metrics().get(series, 0.0)

    # ── the process ──────────────────────────────────────────────────────────────────────────

    @property
    def worker(self) -> int:
        """Return the process id of the worker."""
        return int(self.get("/v1/status").json["workers"][0]["pid"])

    def rss(self, pid: int, field: str = "RssAnon") -> int:
        """Return the private memory of a process in bytes; VmHWM: the peak, with shared memory."""
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB", status, flags=re.M)
        assert found is not None
        return 1024 * int(found[1])

    def wait_ready(self) -> Server:
        wait_for(lambda: self.get("/ready").status == 200, "it is ready", self.log_text)
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server and return its exit code; kill it if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not stop: {self.log_text()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the server and the processes it has started."""
        children = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in children:  # they end without the server, unless a test has suspended them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


@contextlib.contextmanager
def running(folder: Path, *options: object, **rest: Any) -> Iterator[Server]:
    """Run a server, from ready to killed."""
    server = Server(folder, *options, **rest)
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def wait_for(
    done: Callable[[], object], what: str, more: Callable[[], object] = str, patience: float = 0
) -> float:
    """Wait until `done()` is true, and return the seconds it took."""
    start = time.monotonic()
    while True:
        with contextlib.suppress(ConnectionError):
            if done():
                return time.monotonic() - start
        assert time.monotonic() - start < (patience or PATIENCE), f"waited for: {what}; {more()}"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, and theirs."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def form(parts: list[tuple[str, str | None, bytes]]) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a form with the parts [(field, file name, content)]."""
    boundary, out = "----boundary-of-a-test", []
    for field, name, content in parts:
        disposition = f'form-data; name="{field}"' + (
            "" if name is None else f'; filename="{name}"'
        )
        head = f"--{boundary}\r\nContent-Disposition: {disposition}\r\n"
        head += "" if name is None else "Content-Type: application/octet-stream\r\n"
        out.append(head.encode() + b"\r\n" + content + b"\r\n")
    out.append(f"--{boundary}--\r\n".encode())
    return b"".join(out), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def main() -> None:
    """Run a server with limits that the command has no option for."""
    from torch_covnorm.ecology import Ecology
    from torch_covnorm.serve import Keys, Limits
    from torch_covnorm.serve.server import print_address, serve

    given = json.loads(sys.argv[2])
    writes, keys = given.pop("allow_writes", False), given.pop("keys", [])
    serve(
        Ecology(sys.argv[1]),
        port=0,
        limits=Limits(**given),
        keys=Keys(keys),
        allow_writes=writes,
        json_logs=True,
        on_listening=print_address,
    )


if __name__ == "__main__":
    main()
