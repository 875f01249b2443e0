"""Overload: what exceeds the capacity gets 429 at once, and what is accepted is in time."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server import Response, Server, running, wait_for

from torch_covnorm.ecology import Ecology

QUEUE = 8
TRIES = 5
SECONDS = 4  # of overload


@pytest.fixture(scope="module")
def short(house: Ecology) -> Iterator[Server]:
    """A server with a queue of eight images and a long timeout for hanging workers."""
    limits = {"queue": QUEUE, "deadline": 3.0, "hang": 60.0}
    with running(house.folder, limits=limits) as server:
        yield server


def timed(server: Server, domain: str, photo: bytes) -> tuple[Response, float]:
    start = time.monotonic()
    answer = server.predict(domain, photo)
    return answer, time.monotonic() - start


def test_a_full_queue_is_429_with_retry_after_at_once_and_late_work_504(
    short: Server, photo: bytes
):
    """The worker is suspended, so accepted images stay: eight wait for their 504."""
    assert short.predict("roses", photo).status == 200
    worker, batches = short.worker, short.metric("covnorm_batch_images_count")
    os.kill(worker, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(QUEUE) as pool:
            waiting = [pool.submit(timed, short, "roses", photo) for _ in range(QUEUE)]
            wait_for(lambda: short.metric("covnorm_queue_depth") == QUEUE, "the queue is full")
            for _ in range(10):
                answer, seconds = timed(short, "shells", photo)
                assert (answer.status, answer.reason) == (429, "queue_full")
                assert int(answer.headers["retry-after"]) >= 1
                assert seconds < 1.0
                assert not any(w.done() for w in waiting)
            many = short.many([("roses", photo)] * 2)
            assert [r["error"]["reason"] for r in many.json["items"]] == ["queue_full"] * 2
            late = [w.result() for w in waiting]
    finally:
        os.kill(worker, signal.SIGCONT)
    for answer, seconds in late:
        assert (answer.status, answer.reason) == (504, "deadline")
        assert 2.5 < seconds < 10
    assert short.metric("covnorm_queue_depth") == 0
    wait_for(lambda: short.predict("roses", photo).status == 200, "it goes on")
    # One batch was in the worker when it was suspended; the others were dropped, not computed.
    wait_for(lambda: short.metric("covnorm_queue_depth") == 0, "all is done")
    images = short.metrics()
    assert images["covnorm_batch_images_count"] - batches <= 3


def test_work_that_cannot_be_done_in_time_is_429_before_the_queue_is_full(
    house: Ecology, photo: bytes
):
    """The worker is suspended, so only its earlier pace decides how many are too many."""
    limits = {"queue": 100_000, "deadline": 1.0, "hang": 60.0}
    with running(house.folder, limits=limits) as server:
        wait_for(lambda: server.predict("murals", photo).status == 200, "its pace is known")
        worker = server.worker
        os.kill(worker, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(server.many, [("murals", photo)] * 64) for _ in range(8)]
                rows = [row for a in asked for row in a.result().json["items"]]
        finally:
            os.kill(worker, signal.SIGCONT)
        reasons = {row["error"]["reason"] for row in rows}
        assert reasons == {"queue_full", "deadline"}  # some were accepted, but not all


class Bursts:
    """Send many images per request, because the client shares the cores with the server."""

    def __init__(self, server: Server, photo: bytes) -> None:
        self.server = server
        self.items = [("roses", photo), ("shells", photo)] * 8
        self.answers: list[tuple[float, list[dict[str, Any]]]] = []  # seconds, rows

    def ask(self) -> None:
        start = time.monotonic()
        rows = self.server.many(self.items, top=1).json["items"]
        self.answers.append((time.monotonic() - start, rows))

    @property
    def good(self) -> list[dict[str, Any]]:
        return [row for _, rows in self.answers for row in rows if "predictions" in row]

    @property
    def rejected(self) -> list[str]:
        return [
            row["error"]["reason"] for _, rows in self.answers for row in rows if "error" in row
        ]

    def closed_loop(self, clients: int, seconds: float) -> float:
        """Return the images per second that this many clients get, each with one open request."""
        ends = time.monotonic() + seconds

        def client() -> None:
            while time.monotonic() < ends:
                self.ask()

        run([client] * clients)
        return len(self.good) / seconds

    def open_loop(self, rate: float, seconds: float) -> None:
        """Send this many images per second, whether or not the server keeps up."""
        threads: list[threading.Thread] = []
        start = time.monotonic()
        while (now := time.monotonic()) < start + seconds:
            if len(threads) * len(self.items) < rate * (now - start):
                threads.append(threading.Thread(target=self.ask))
                threads[-1].start()
            time.sleep(0.002)
        for thread in threads:
            thread.join()


def run(works: list[Any]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def lost() -> tuple[int, int]:
    """Return the time that other virtual machines took from this one, and the total time."""
    times = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return times[7], sum(times)


def test_at_three_times_its_capacity_accepted_images_meet_their_deadline(
    house: Ecology, photo: bytes
):
    """If other virtual machines take much of the CPU, the capacity means nothing and the test is
    repeated. The last attempt counts in any case."""
    for left in reversed(range(TRIES)):
        stolen, time_ = lost()
        try:
            three_times(house, photo)
        except AssertionError:
            now, then = lost()
            if not left or now - stolen < 0.05 * (then - time_):
                raise
        else:
            break


def three_times(house: Ecology, photo: bytes) -> None:
    deadline = 2.0
    options = ["--deadline", deadline, "--batch", 8, "--queue", 5000]
    with running(house.folder, *options) as server:
        Bursts(server, photo).closed_loop(1, 0.5)  # loads both domains
        capacity = Bursts(server, photo).closed_loop(3, 2.0)
        over = Bursts(server, photo)
        over.open_loop(3 * capacity, SECONDS)
        good, rejected = over.good, over.rejected
        offered = len(good) + len(rejected)
        assert offered > 2 * capacity * SECONDS, "the load was not an overload"
        # Hardly any accepted image gets 504, and the results are in time.
        late = rejected.count("deadline")
        assert late <= 0.01 * (len(good) + late), (late, len(good))
        assert set(rejected) <= {"queue_full", "deadline"}
        assert rejected.count("queue_full") > 0.3 * offered
        p99 = statistics.quantiles([row["seconds"]["total"] for row in good], n=100)[98]
        assert p99 <= deadline
        assert len(good) > 0.3 * capacity * SECONDS  # it kept working
        at_once = [seconds for seconds, rows in over.answers if all("error" in r for r in rows)]
        if at_once:
            assert statistics.median(at_once) < 0.5 * deadline
        # Nothing else degrades, and afterwards everything works as before.
        assert server.get("/ready").status == 200
        assert server.predict("roses", photo).status == 200


def test_control_the_same_request_succeeds_within_the_deadline(short: Server, photo: bytes):
    """Within the deadline, the same request succeeds."""
    for _ in range(5):
        answer, seconds = timed(short, "roses", photo)
        assert answer.status == 200
        assert seconds < 3
