"""The metrics are right, and clients cannot make their number grow."""

from __future__ import annotations

import random
import string
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import houses
import pytest
from server import Server, wait_for

NEEDED = [
    "covnorm_requests_total",
    "covnorm_errors_total",
    "covnorm_images_total",
    "covnorm_queue_depth",
    "covnorm_queue_seconds_sum",
    "covnorm_compute_seconds_sum",
    "covnorm_request_seconds_sum",
    "covnorm_batch_images_sum",
    "covnorm_batch_domains_sum",
    "covnorm_loads_total",
    "covnorm_load_seconds_sum",
    "covnorm_evictions_total",
    "covnorm_resident_bytes",
    "covnorm_resident_domains",
    "covnorm_worker_restarts_total",
    "covnorm_domains",
]


def test_every_documented_metric_exists(server: Server, photo: bytes):
    server.many([("roses", photo), ("shells", photo), ("nobody", photo)])
    names = {series.partition("{")[0] for series in server.metrics()}
    assert set(NEEDED) <= names
    assert server.get("/metrics").headers["content-type"].startswith("text/plain")


def test_the_metrics_match_the_requests(writable: SimpleNamespace, photo: bytes):
    server: Server = writable.server
    resident = 'covnorm_resident_domains{worker="0"}'
    houses.put(writable.ecology, "one", "two", "three")
    server.predict("stays", photo)
    wait_for(lambda: server.metrics()[resident] == 1, "what other tests had is gone")
    wait_for(lambda: server.metric("covnorm_domains") == 4, "the domains are seen")
    start = server.metrics()
    assert server.many([("one", photo)] * 3 + [("two", photo)] * 2).status == 200
    server.predict("three", photo)
    server.predict("nobody", photo)
    server.predict("three", b"no image")
    server.get("/nothing")
    server.many([("nobody", photo), ("three", b""), ("three", photo)])
    server.ask("POST", "/v1/predict", b"{", {"Content-Type": "application/json"})
    server.ask("POST", "/v1/domains/three/predict", b"x", {"Content-Length": "99999999"})
    now = server.metrics()
    gained = {k: v - start.get(k, 0) for k, v in now.items() if v != start.get(k, 0)}
    assert gained["covnorm_images_total"] == 7
    assert gained["covnorm_batch_images_sum"] == 7
    assert gained["covnorm_request_seconds_count"] == 7
    assert gained["covnorm_queue_seconds_count"] == 7
    assert gained["covnorm_batch_domains_sum"] >= 4
    assert gained["covnorm_batch_images_count"] == gained["covnorm_compute_seconds_count"] <= 7
    assert gained['covnorm_loads_total{result="ok"}'] == 3
    assert gained["covnorm_load_seconds_count"] == 3
    assert gained[resident] == 3
    assert gained['covnorm_resident_bytes{worker="0"}'] > 500_000
    errors = {
        k.split('"')[1]: v for k, v in gained.items() if k.startswith("covnorm_errors_total{")
    }
    wanted = {"unknown_domain": 2, "bad_image": 2, "invalid": 1, "too_large": 1, "http": 1}
    assert errors == wanted
    predict = 'covnorm_requests_total{route="/v1/domains/{name}/predict",status="%d"}'
    assert [gained[predict % n] for n in (200, 404, 422)] == [1, 1, 1]
    other = 'covnorm_requests_total{route="other",status="%d"}'
    assert [gained[other % n] for n in (404, 413)] == [1, 1]  # rejected before routing
    assert now["covnorm_queue_depth"] == 0
    assert now["covnorm_domains"] == 4


def test_the_number_of_series_is_bounded_whatever_names_arrive(server: Server, photo: bytes):
    rng = random.Random(0)

    def word() -> str:
        return "".join(rng.choices(string.ascii_lowercase + string.digits, k=12))

    def noise(n: int) -> None:
        for _ in range(n):
            server.predict(word(), photo)
            server.get(f"/v1/domains/{word()}?{word()}={word()}")
            server.get(f"/{word()}/{word()}", **{"X-Request-ID": word(), f"X-{word()}": word()})
            server.ask(word().upper(), f"/v1/{word()}")
            server.ask(word().upper(), "/v1/predict")
            server.many([(word(), photo), (word(), b"x")])
            server.predict("roses", photo, headers={"Content-Type": f"text/{word()}"})

    noise(2)
    before = set(server.metrics())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(noise, [10] * 4))
    assert set(server.metrics()) == before
    assert len(before) < 300


def test_the_status_route_agrees_with_the_metrics(server: Server, photo: bytes):
    server.predict("roses", photo)
    wait_for(lambda: server.metric("covnorm_queue_depth") == 0, "nothing is under way")
    status, metrics = server.get("/v1/status").json, server.metrics()
    assert status["images"] == metrics["covnorm_images_total"]
    assert status["queue"] == 0
    assert status["resident_bytes"] == metrics['covnorm_resident_bytes{worker="0"}']
    assert status["domains"] == metrics["covnorm_domains"]
    assert status["ready"] is True


@pytest.mark.parametrize("path", ["/", "/live", "/ready", "/v1/domains", "/v1/status"])
def test_requests_without_images_are_counted_by_route(path: str, server: Server):
    series = f'covnorm_requests_total{{route="{path}",status="200"}}'
    before = server.metric(series)
    server.get(path)
    assert server.metric(series) == before + 1
