"""Overload: what exceeds the capacity gets 429 at once, and what is accepted is in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server import Response, Server, running, wait_for

from torch_covnorm.ecology import Ecology

QUEUE = 8


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


def test_control_the_same_request_succeeds_within_the_deadline(short: Server, photo: bytes):
    """Within the deadline, the same request succeeds."""
    for _ in range(5):
        answer, seconds = timed(short, "roses", photo)
        assert answer.status == 200
        assert seconds < 3
