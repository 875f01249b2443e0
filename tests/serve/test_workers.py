"""A worker that dies or hangs is noticed and replaced, and its requests survive."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import houses
import numpy as np
import pytest
from PIL import Image
from server import PATIENCE, Server, descendants, running, wait_for

from torch_covnorm.ecology import Ecology
from torch_covnorm.serve import worker
from torch_covnorm.serve.catalog import version_of
from torch_covnorm.serve.errors import DomainChanged, RequestError

HANG = 8.0


@pytest.fixture(scope="module")
def early(house: Ecology) -> Iterator[SimpleNamespace]:
    """A server, and its /live and /ready responses before its worker had started.

    Deadlines are longer than a restart; a worker that hangs for some seconds is replaced.
    """
    limits = {"deadline": 80.0, "hang": HANG, "queue": 10_000}
    server = Server(house.folder, limits=limits)
    try:
        wait_for(lambda: server.get("/live").status == 200, "it lives")
        live, ready = server.get("/live"), server.get("/ready")
        yield SimpleNamespace(server=server.wait_ready(), live=live, ready=ready)
    finally:
        server.kill()


@pytest.fixture
def patient(early: SimpleNamespace) -> Server:
    server: Server = early.server
    return server.wait_ready()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_live_needs_the_process_and_ready_a_forward_pass(early: SimpleNamespace):
    assert (early.live.status, early.live.json) == (200, {"ok": True})
    assert (early.ready.status, early.ready.reason) == (503, "not_ready")
    assert "retry-after" in early.ready.headers
    now = early.server.get("/ready")
    assert (now.status, now.json) == (200, {"ok": True})


def test_a_killed_worker_loses_no_request_and_is_replaced(patient: Server, photo: bytes):
    wanted = {name: patient.predict(name, photo).best for name in ("roses", "shells", "coins")}
    first, restarts = patient.worker, patient.metric("covnorm_worker_restarts_total")
    stop = threading.Event()

    def client(name: str) -> int:
        n = 0
        while not stop.is_set():
            answer = patient.predict(name, photo)
            assert answer.status == 200, answer.body
            assert answer.best[0] == wanted[name][0]
            n += 1
        return n

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, name) for name in list(wanted) * 2]
        time.sleep(0.5)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: patient.get("/ready").status == 503, "it is noticed")
        patient.wait_ready()
        time.sleep(0.5)
        stop.set()
        assert all(c.result() for c in clients)
    assert patient.worker != first
    assert not alive(first)
    assert patient.metric("covnorm_worker_restarts_total") == restarts + 1


def test_a_hung_worker_is_noticed_within_seconds_and_replaced(patient: Server):
    """Without any request, because the server probes its workers."""
    first = patient.worker
    os.kill(first, signal.SIGSTOP)
    shows = wait_for(lambda: patient.get("/ready").status == 503, "it is noticed")
    assert alive(first)  # it is noticed before it is killed
    assert shows < 12
    assert patient.get("/live").status == 200
    patient.wait_ready()
    assert patient.worker != first
    assert not alive(first)


def test_a_hung_worker_under_load_blocks_nothing_else(patient: Server):
    """Its pipe becomes full; the server must not wait for it."""
    large = houses.encoded(Image.effect_noise((300, 300), 80).convert("RGB"), "PNG")
    assert patient.predict("murals", large).status == 200
    first = patient.worker
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(patient.many, [("murals", large)] * 8, 1) for _ in range(4)]
        try:
            for _ in range(20):
                for path in ("/live", "/v1/domains"):
                    assert patient.ask("GET", path, timeout=5).status == 200
                time.sleep(0.1)
        except BaseException:
            os.kill(first, signal.SIGCONT)  # otherwise the four requests would wait for long
            raise
        answers = [a.result() for a in asked]
    assert patient.worker != first
    rows = [row for answer in answers for row in answer.json["items"]]
    assert len(rows) == 32
    assert all(row.get("predictions") for row in rows), rows[0]


def test_two_workers_share_the_load_and_replace_each_other(house: Ecology, photo: bytes):
    with running(house.folder, "--workers", 2, "--deadline", 60) as server:
        pids = [w["pid"] for w in server.get("/v1/status").json["workers"]]
        assert len(set(pids)) == 2
        wanted = server.predict("roses", photo).best
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: server.predict("roses", photo), range(64)))
        assert {a.best[0] for a in found} == {wanted[0]}
        os.kill(pids[0], signal.SIGKILL)
        start = time.monotonic()
        for _ in range(10):
            assert server.predict("roses", photo).best[0] == wanted[0]
        assert server.predict("shells", photo).status == 200
        assert time.monotonic() - start < 20
        server.wait_ready()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[Connection]:
    """Run a worker without a server, and yield its pipe."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=worker.main, args=(theirs, str(folder), False, 1), daemon=True)
    process.start()
    theirs.close()
    try:
        yield pipe
    finally:
        process.kill()
        process.join()
        pipe.close()


def test_a_worker_loads_the_requested_version_or_none(house: Ecology):
    """The store may have changed since a request was prepared for one version."""
    with alone(house.folder) as pipe:

        def heard() -> tuple[Any, ...]:
            assert pipe.poll(PATIENCE)
            message: tuple[Any, ...] = pipe.recv()
            return message

        assert heard()[0] == "started"
        versions = {
            name: version_of(house.entry(name), house.bases) for name in ("roses", "north", "south")
        }
        for name in versions:
            pipe.send(("load", 1, name, versions["roses" if name != "roses" else "north"]))
            word, number, value, _ = heard()
            assert (word, number, type(value)) == ("result", 1, DomainChanged)
        images = np.zeros((1, 3, 48, 48), np.uint8)
        pipe.send(("batch", 2, ["roses"], images, [1]))
        word, number, (error,), _ = heard()
        assert (word, number) == ("result", 2)
        assert isinstance(error, RequestError)  # it is not loaded
        assert (error.status, error.reason) == (409, "broken_domain")
        assert "roses" in error.message
        for name, version in versions.items():
            pipe.send(("load", 3, name, version))
            word, number, size, _ = heard()
            net = house.network()
            domain = house.load(net, name)
            net.prepare_(name, only=True)
            assert (word, number, size) == ("result", 3, domain.bytes)
        pipe.send(("batch", 4, ["roses"], images, [1]))
        assert heard()[2][0][0]["label"].startswith("roses-")


def test_a_worker_that_keeps_dying_is_restarted_with_a_delay(patient: Server, photo: bytes):
    before, ends = patient.metric("covnorm_worker_restarts_total"), time.monotonic() + 3
    while time.monotonic() < ends:
        for pid in descendants(patient.process.pid):
            with contextlib.suppress(OSError):
                if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    assert patient.get("/live").status == 200
    assert patient.metric("covnorm_worker_restarts_total") - before < 12
    patient.wait_ready()
    assert patient.predict("roses", photo).status == 200
