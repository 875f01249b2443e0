"""SIGTERM drains: whatever was accepted is answered, and nothing is left behind."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from server import PATIENCE, Answer, Server, descendants, wait_for
from small_ecology import backbone
from test_clients import head, opened, rest_of, status

from torch_covnorm.ecology import Ecology


@pytest.fixture
def server(house: Ecology) -> Iterator[Server]:
    """One of its own for each test: it ends."""
    made = Server(house.folder, "--deadline", 30, "--queue", 2000)
    try:
        yield made.wait_ready()
    finally:
        made.kill()


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Load:
    """Clients that ask, each on a new connection, until nobody listens any more."""

    def __init__(self, server: Server, photo: bytes, clients: int = 12) -> None:
        self.server, self.photo = server, photo
        self.outcomes: list[tuple[float, str]] = []  # (when all of it was sent, what came)
        self.threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def _ask(self, i: int) -> None:
        got = ""
        while got != "nothing":
            connection = self.server.connect()
            sent, got = 0.0, "nothing"
            try:
                name = ("roses", "shells", "coins", "north")[i % 4]
                connection.request("POST", f"/v1/domains/{name}/predict", self.photo)
                sent = time.monotonic()
                response = connection.getresponse()
                got = "half an answer"
                body = response.read()
                got = str(response.status) if body.endswith(b"}") else got
            except (ConnectionError, TimeoutError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            self.outcomes.append((sent or time.monotonic(), got))

    def end(self) -> None:
        for thread in self.threads:
            thread.join()


@pytest.fixture(scope="module")
def stopped(house: Ecology, photo: bytes) -> Iterator[SimpleNamespace]:
    """A server that got SIGTERM when it had all kinds of things under way."""
    server = Server(house.folder, "--deadline", 30, "--queue", 2000)
    try:
        server.wait_ready()
        load = Load(server, photo)
        wait_for(lambda: len(load.outcomes) > 60, "the load is on")
        idle = server.connect()
        idle.request("GET", "/live")
        idle.getresponse().read()
        with (
            opened(server, head(len(photo), "Connection: close"), photo[:500]) as upload,
            opened(server, b"GET /li"),
            opened(server),
            ThreadPoolExecutor(8) as pool,
        ):
            images = [("roses", photo), ("coins", photo)] * 16
            queued = [pool.submit(server.many, images) for _ in range(8)]
            wait_for(lambda: server.metric("covnorm_queue_depth") > 50, "many wait")
            pids, signalled = descendants(server.process.pid), time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(1)
            upload.sendall(photo[500:])
            uploaded = status(rest_of(upload))
            answers: list[Answer] = [q.result() for q in queued]
            code = server.process.wait(PATIENCE)
            took = time.monotonic() - signalled
        load.end()
        idle.close()
        yield SimpleNamespace(
            before=[got for sent, got in load.outcomes if sent < signalled],
            after=[got for sent, got in load.outcomes if sent >= signalled],
            queued=answers,
            uploaded=uploaded,
            code=code,
            took=took,
            pids=pids,
            lines=server.lines(),
        )
    finally:
        server.kill()


def test_sigterm_under_load_loses_no_accepted_request(stopped: SimpleNamespace):
    """Every request that was sent before the signal is answered; later ones are, or are refused
    before any of their answer came."""
    assert len(stopped.before) > 60
    assert set(stopped.before) == {"200"}, stopped.before
    assert set(stopped.after) <= {"200", "503", "nothing"}, stopped.after


def test_what_waits_for_its_turn_at_sigterm_is_answered(stopped: SimpleNamespace):
    assert [answer.status for answer in stopped.queued] == [200] * 8
    rows = [row for answer in stopped.queued for row in answer.json["items"]]
    assert len(rows) == 8 * 32
    assert all("predictions" in row for row in rows)


def test_an_upload_under_way_at_sigterm_is_finished(stopped: SimpleNamespace):
    assert stopped.uploaded == 200


def test_it_ends_well_and_idle_connections_do_not_keep_it(stopped: SimpleNamespace):
    assert stopped.code == 0
    assert stopped.took < 18  # less than the time that is given at most
    wait_for(lambda: gone(stopped.pids), "its processes are gone")
    assert stopped.lines[-1]["event"] == "stopped"
    assert not [line for line in stopped.lines if line["level"] == "error"]


def test_a_second_signal_hurries_it(server: Server, photo: bytes):
    with opened(server, head(len(photo)), photo[:100]):  # never finished
        pids = descendants(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert server.process.poll() is None
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
        assert time.monotonic() - start < 12
        wait_for(lambda: gone(pids), "its processes are gone")


def test_kill_9_leaves_no_process_behind(house: Ecology):
    """Not even a worker that has hardly begun."""
    server = Server(house.folder)
    try:
        wait_for(lambda: server.get("/live").status == 200, "it lives")
        pids = descendants(server.process.pid)
        assert pids
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: gone(pids), "its processes are gone")
    finally:
        server.kill()


def test_sigterm_while_it_starts_ends_it(house: Ecology):
    server = Server(house.folder)
    try:
        wait_for(lambda: server.get("/live").status == 200, "it lives")
        pids = descendants(server.process.pid)
        assert server.stop() == 0
        wait_for(lambda: gone(pids), "its processes are gone")
    finally:
        server.kill()


def test_an_ecology_that_cannot_be_served_is_an_error_at_the_start(tmp_path: Path):
    """Not a worker that dies again and again."""
    ecology = Ecology.create(tmp_path / "house", backbone())
    with pytest.raises(AssertionError, match=r"(?s)did not start.*passed from Python"):
        Server(ecology.folder)
