"""More than it can do: the queue says no at once, and what is accepted comes in time."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server import Answer, Server, running, wait_for

from torch_covnorm.ecology import Ecology

QUEUE = 8
SECONDS = 4  # of overload


@pytest.fixture(scope="module")
def short(house: Ecology) -> Iterator[Server]:
    """A queue of eight images, a worker that may be silent for long."""
    limits = {"queue": QUEUE, "deadline": 3.0, "hang": 60.0}
    with running(house.folder, limits=limits) as server:
        yield server


def timed(server: Server, domain: str, photo: bytes) -> tuple[Answer, float]:
    start = time.monotonic()
    answer = server.predict(domain, photo)
    return answer, time.monotonic() - start


def test_a_full_queue_is_429_with_retry_after_at_once_and_late_work_504(
    short: Server, photo: bytes
):
    """The worker is stopped, so what is accepted stays: eight wait for their 504."""
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
    # One batch was with the worker when it stopped; the others were dropped, not computed.
    wait_for(lambda: short.metric("covnorm_queue_depth") == 0, "all is done")
    images = short.metrics()
    assert images["covnorm_batch_images_count"] - batches <= 3


def test_at_three_times_its_capacity_the_accepted_keep_their_deadline(house: Ecology, photo: bytes):
    deadline = 2.0
    with running(house.folder, "--deadline", deadline, "--batch", 8, "--queue", 5000) as server:
        server.predict("roses", photo)

        def rate(clients: int, seconds: float) -> float:
            """Images a second that so many clients get, one behind the other."""
            ends = time.monotonic() + seconds
            done = []

            def client() -> None:
                while time.monotonic() < ends:
                    if server.predict("roses", photo).status == 200:
                        done.append(1)

            threads = [threading.Thread(target=client) for _ in range(clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return len(done) / seconds

        capacity = rate(8, 2.0)
        # Many images a request: the generator shares this machine's cores with the server.
        size, answers = 16, []
        lock = threading.Lock()

        def burst() -> None:
            start = time.monotonic()
            rows = server.many([("roses", photo), ("shells", photo)] * (size // 2)).json["items"]
            with lock:
                answers.append((time.monotonic() - start, rows))

        gap, threads = size / (3 * capacity), []
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            threads.append(threading.Thread(target=burst))
            threads[-1].start()
            time.sleep(gap)
        for thread in threads:
            thread.join()
        good = [r for _, rows in answers for r in rows if "predictions" in r]
        bad = [r["error"]["reason"] for _, rows in answers for r in rows if "error" in r]
        offered = len(good) + len(bad)
        assert offered > 2 * capacity * SECONDS, "the load was no overload"
        # Accepted is accepted: hardly any gets 504, and the answers come in time.
        late = bad.count("deadline")
        assert late <= 0.01 * (len(good) + late), (late, len(good))
        assert set(bad) <= {"queue_full", "deadline"}
        assert bad.count("queue_full") > 0.2 * offered
        p99 = statistics.quantiles([r["seconds"]["total"] for r in good], n=100)[98]
        assert p99 <= deadline
        assert len(good) > 0.3 * capacity * SECONDS  # and it worked all the while
        refused = [s for s, rows in answers if all("error" in r for r in rows)]
        if refused:
            assert statistics.median(refused) < 0.5 * deadline
        # Nothing else degrades, and afterwards all is as before.
        assert server.get("/ready").status == 200
        assert server.predict("roses", photo).status == 200


def test_control_the_deadline_is_what_ends_it(short: Server, photo: bytes):
    """Within it, the same request is answered."""
    for _ in range(5):
        answer, seconds = timed(short, "roses", photo)
        assert answer.status == 200
        assert seconds < 3
