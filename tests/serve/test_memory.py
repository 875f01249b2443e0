"""Domains in memory: bounded, least recently used evicted first, never one in use, no leaks."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import houses
import pytest
from server import Response, Server, running, wait_for
from small_ecology import content

from torch_covnorm import records
from torch_covnorm.ecology import Ecology
from torch_covnorm.ecology.manifest import FORMAT, MANIFEST

NAMES = ["ash", "elm", "fir", "oak", "yew"]
BYTES = 'covnorm_resident_bytes{worker="0"}'
THERE = 'covnorm_resident_domains{worker="0"}'
LOADED = 'covnorm_loads_total{result="ok"}'
EVICTED = "covnorm_evictions_total"


def resident(server: Server) -> set[str]:
    return {row["domain"] for row in server.get("/v1/domains").json["domains"] if row["resident"]}


@pytest.fixture(scope="module")
def forest(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """An ecology with five domains of one size and a large one; `one`: bytes of one in memory."""
    ecology = houses.create(tmp_path_factory.mktemp("forest") / "forest")
    houses.put(ecology, *NAMES, adapter="residual")
    houses.put(ecology, "giant", adapter="own")
    net = ecology.network()
    ash = ecology.load(net, "ash")
    net.prepare_("ash", only=True)
    return SimpleNamespace(ecology=ecology, one=ash.bytes)


@pytest.fixture(scope="module")
def small(forest: SimpleNamespace) -> Iterator[Server]:
    """A server with memory for two of them."""
    limit = 2.5 * forest.one / 1e6
    with running(forest.ecology.folder, "--resident", limit, "--deadline", 60) as server:
        yield server


def test_the_limit_holds_and_the_least_recently_used_is_evicted(
    small: Server, forest: SimpleNamespace, photo: bytes
):
    for name in ("ash", "elm"):
        assert small.predict(name, photo).status == 200
    assert resident(small) == {"ash", "elm"}
    small.predict("ash", photo)
    small.predict("fir", photo)
    assert resident(small) == {"ash", "fir"}
    small.predict("oak", photo)
    assert resident(small) == {"fir", "oak"}
    metrics = small.metrics()
    assert metrics[EVICTED] == 2
    assert metrics[THERE] == 2
    assert metrics[BYTES] == 2 * forest.one <= 2.5 * forest.one


def test_a_domain_in_use_is_never_evicted(small: Server, forest: SimpleNamespace, photo: bytes):
    """16 clients use five domains, two of which fit: every result is right, none is an error."""
    wanted = {name: small.predict(name, photo).best for name in NAMES}
    before = small.metric(EVICTED)
    most = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            most.append(small.metric(BYTES))

    def client(seed: int) -> list[tuple[str, Response]]:
        rng = random.Random(seed)
        return [(n, small.predict(n, photo)) for n in rng.choices(NAMES, k=8)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(16) as pool:
        found = [pair for pairs in pool.map(client, range(16)) for pair in pairs]
    done.set()
    watcher.join()
    for name, answer in found:
        assert answer.status == 200, answer.body
        assert answer.best[0] == wanted[name][0]
        assert answer.best[1] == pytest.approx(wanted[name][1], abs=1e-5)
    assert small.metric(EVICTED) > before + 5
    assert max(most) <= 2.5 * forest.one


def test_domains_that_are_always_in_use_take_turns_with_one_that_waits(small: Server, photo: bytes):
    """Two fill the memory and are always in use; a third is predicted nevertheless."""
    stop = threading.Event()

    def client(name: str) -> set[int]:
        seen = set()
        while not stop.is_set():
            seen |= {small.many([(name, photo)] * 8).status}
        return seen

    with ThreadPoolExecutor(9) as pool:
        busy = [pool.submit(client, name) for name in ("ash", "elm") * 4]
        for name in ("fir", "oak", "yew"):
            answer = small.predict(name, photo, timeout=30)
            assert answer.status == 200, answer.body
        stop.set()
        assert set().union(*(b.result() for b in busy)) == {200}


def test_a_request_for_more_domains_than_fit_succeeds(small: Server, photo: bytes):
    rows = small.many([(name, photo) for name in NAMES * 4]).json["items"]
    for name, row in zip(NAMES * 4, rows, strict=True):
        assert row["domain"] == name
        assert row["predictions"][0]["label"].startswith(name)


def test_a_domain_that_can_never_fit_is_503_at_once(small: Server, photo: bytes):
    answer = small.predict("giant", photo)
    assert (answer.status, answer.reason) == (503, "no_room")
    assert "--resident" in answer.message
    assert small.predict("ash", photo).status == 200


def test_a_pinned_domain_is_loaded_at_the_start_and_never_evicted(
    forest: SimpleNamespace, photo: bytes
):
    limit = 2.5 * forest.one / 1e6
    options = ["--resident", limit, "--pin", "oak", "--deadline", 60]
    with running(forest.ecology.folder, *options) as server:
        wait_for(lambda: resident(server) == {"oak"}, "it is loaded without a request")
        for name in ("ash", "elm", "fir", "yew"):
            assert server.predict(name, photo).status == 200
            assert resident(server) == {"oak", name}
        assert server.predict("giant", photo).reason == "no_room"
        os.kill(server.worker, 9)
        wait_for(lambda: server.get("/ready").status == 503, "the worker is gone")
        server.wait_ready()
        wait_for(lambda: resident(server) == {"oak"}, "it is loaded again in the new worker")


def test_a_pin_that_is_not_a_domain_is_an_error(forest: SimpleNamespace):
    with pytest.raises(AssertionError, match=r"(?s)did not start.*'oak'"):
        Server(forest.ecology.folder, "--pin", "oka").kill()


@pytest.fixture
def slow(forest: SimpleNamespace) -> Iterator[tuple[str, threading.Event]]:
    """A domain whose tensors can be read once the event is set: until then its file is a pipe."""
    ecology: Ecology = forest.ecology
    houses.put(ecology, "slow", adapter="lowrank")
    file = ecology.blobs.path(ecology.entry("slow").blobs["tensors"])
    data, go = file.read_bytes(), threading.Event()
    file.unlink()
    os.mkfifo(file)

    def give() -> None:
        go.wait(60)
        with file.open("wb") as pipe:  # waits for the reader
            pipe.write(data)
        file.unlink()
        file.write_bytes(data)

    giver = threading.Thread(target=give, daemon=True)
    giver.start()
    yield "slow", go
    go.set()
    giver.join(30)
    ecology.remove(["slow"])


def test_many_misses_load_once_and_two_domains_load_in_parallel(
    forest: SimpleNamespace, slow: tuple[str, threading.Event], photo: bytes
):
    """While the load of one domain waits for the disk, others are loaded and served."""
    name, go = slow
    with running(forest.ecology.folder, "--deadline", 60) as server:
        with ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(server.predict, name, photo) for _ in range(12)]
            wait_for(lambda: name in resident(server), "its load began")
            assert server.predict("ash", photo).status == 200
            assert server.predict("elm", photo).status == 200
            assert server.metric(LOADED) == 2
            assert not any(w.done() for w in waiting)
            go.set()
            answers = [w.result() for w in waiting]
        assert [a.status for a in answers] == [200] * 12
        assert len({a.best for a in answers}) <= 2
        assert server.metric(LOADED) == 3


def test_a_load_without_waiting_requests_is_completed(
    forest: SimpleNamespace, slow: tuple[str, threading.Event], photo: bytes
):
    """Its requests get 504; then it is in memory, idle, and can be evicted."""
    name, go = slow
    limit = 1.2 * forest.one / 1e6
    options = ["--deadline", 2, "--resident", limit]
    with running(forest.ecology.folder, *options) as server:
        assert server.predict(name, photo).status == 504
        go.set()
        wait_for(lambda: server.metric(LOADED) == 1, "it is loaded all the same")
        wait_for(lambda: server.predict("ash", photo).status == 200, "it makes room")
        assert server.metric(EVICTED) == 1


def test_a_domain_removed_during_its_load_leaves_no_memory(
    forest: SimpleNamespace, slow: tuple[str, threading.Event], photo: bytes
):
    name, go = slow
    manifest = forest.ecology.folder / MANIFEST
    whole = manifest.read_bytes()
    with running(forest.ecology.folder, "--deadline", 30) as server:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.predict, name, photo)
            wait_for(lambda: name in resident(server), "its load began")
            rewrite(manifest, json.loads(whole), {})
            wait_for(lambda: server.metric("covnorm_domains") == 6, "the server saw it go")
            go.set()
            assert asked.result().status in (200, 404, 409)
        wait_for(lambda: server.metric(THERE) == 0, "nothing is left in memory", server.log_text)
        manifest.write_bytes(whole)
        wait_for(lambda: server.predict(name, photo).status == 200, "it may come again")


def rewrite(file: Path, manifest: dict, names: dict[str, str]) -> None:
    """Write the manifest without the slow domain, and with copies: {new name: original}."""
    made = content(manifest)
    made["domains"] = dict(made["domains"])
    made["domains"].pop("slow", None)
    for new, old in names.items():
        made["domains"][new] = made["domains"][old]
    temporary = file.with_name("next")
    temporary.write_bytes(records.sealed(FORMAT, made, indent=None))
    temporary.replace(file)


def test_memory_stays_flat_over_1000_adds_and_removes(tmp_path: Path, photo: bytes):
    """Domains are added to the manifest, eight at a time, loaded, used, and removed again."""
    ecology = houses.create(tmp_path / "house", "resnet26")  # its domains load fast
    houses.put(ecology, "model")
    manifest = ecology.folder / MANIFEST
    empty = json.loads(manifest.read_bytes())
    with running(ecology.folder, "--deadline", 60, "--wait", 1) as server:
        pids = {"server": server.process.pid, "worker": server.worker}
        seen = {}
        for start in range(0, 1000, 8):
            names = [f"guest-{i}" for i in range(start, start + 8)]
            rewrite(manifest, empty, dict.fromkeys(names, "model"))
            rows = server.many([(name, photo) for name in names], top=1).json["items"]
            assert all("predictions" in row for row in rows), rows
            if start + 8 in (304, 656, 1000):
                rewrite(manifest, empty, {})
                wait_for(lambda: server.metric(THERE) == 0, "all are gone")
                seen[start + 8] = {who: server.rss(pid) for who, pid in pids.items()}
        assert server.metric(LOADED) == 1000
        assert pids["worker"] == server.worker
    # A leak would show in both halves; the allocator may take more memory once in a while.
    one = 4 * ecology.entry("model").total
    for who in pids:
        halves = seen[656][who] - seen[304][who], seen[1000][who] - seen[656][who]
        assert min(halves) < 50 * one, seen  # of 350 that were added and removed
