"""A domain that cannot be served gets 409, and the other domains are not affected."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import houses
import pytest
from server import Response, Server, wait_for
from small_ecology import files, forge, forge_blob

from torch_covnorm.ecology import Ecology
from torch_covnorm.ecology.manifest import MANIFEST


def blob(ecology: Ecology, name: str, part: str) -> Path:
    return ecology.blobs.path(ecology.entry(name).blobs[part])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE = {
    "a flipped bit in the tensors": lambda e, n: flip(blob(e, n, "tensors")),
    "a flipped bit in the record": lambda e, n: flip(blob(e, n, "record")),
    "truncated tensors": lambda e, n: cut(blob(e, n, "tensors")),
    "truncated record": lambda e, n: cut(blob(e, n, "record")),
    "missing tensors": lambda e, n: blob(e, n, "tensors").unlink(),
    "missing record": lambda e, n: blob(e, n, "record").unlink(),
    "empty tensors": lambda e, n: blob(e, n, "tensors").write_bytes(b""),
}


def forged(preprocessing: dict[str, Any]) -> Any:
    """Return a change that keeps checksums valid but makes the preprocessing nonsense."""
    return lambda e, n: forge_blob(
        e.folder,
        ("domains", n, "blobs", "record"),
        lambda record: record["preprocessing"].update(preprocessing),
    )


FORGED: dict[str, Any] = {
    "no number for a side": forged({"size": "large"}),
    "no side": forged({"size": 0}),
    "a side of a million": forged({"size": 1_000_000}),
    "a side that is a list": forged({"size": [32, 32]}),
    "two means": forged({"mean": [0.5, 0.5]}),
    "words for means": forged({"mean": ["a", "b", "c"]}),
    "a deviation of nothing": forged({"std": [0.5, 0.0, 0.5]}),
    "an unknown fit": forged({"fit": "stretch"}),
    "a background that is not a color": forged({"background": "transparent"}),
    "a background that is a list": forged({"background": [255, 255, 255]}),
    "no means": lambda e, n: forge_blob(
        e.folder,
        ("domains", n, "blobs", "record"),
        lambda record: record["preprocessing"].pop("mean"),
    ),
    "another backbone": lambda e, n: forge_blob(
        e.folder,
        ("domains", n, "blobs", "record"),
        lambda record: record["backbone"].update(fingerprint="0" * 64),
    ),
    "a record that is no record": lambda e, n: forge_blob(
        e.folder, ("domains", n, "blobs", "record"), lambda record: record.clear()
    ),
}


@contextlib.contextmanager
def steady(server: Server, domain: str, photo: bytes, clients: int = 2) -> Iterator[Counter[int]]:
    """Send requests for a domain while the block runs; count the responses by status."""
    seen: Counter[int] = Counter()
    stop = threading.Event()
    failures: list[BaseException] = []

    def client() -> None:
        try:
            while not stop.is_set():
                seen[server.predict(domain, photo).status] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.fixture
def guest(writable: SimpleNamespace) -> str:
    """Add a domain for one test."""
    houses.put(writable.ecology, "guest")
    return "guest"


@pytest.mark.parametrize("damage", [*DAMAGE, *FORGED])
def test_a_broken_domain_is_409_and_the_others_are_served(
    damage: str, guest: str, writable: SimpleNamespace, photo: bytes
):
    server: Server = writable.server
    wanted = server.predict("stays", photo).best
    (DAMAGE | FORGED)[damage](writable.ecology, guest)
    for _ in range(2):
        answer = server.predict(guest, photo)
        assert (answer.status, answer.reason) == (409, "broken_domain"), answer.body
        assert guest in answer.message
        assert str(writable.ecology.folder) not in answer.message
    assert server.predict("stays", photo).best == wanted
    rows = server.many([("stays", photo), (guest, photo), ("stays", photo)]).json["items"]
    assert rows[1]["error"]["reason"] == "broken_domain"
    assert rows[0]["predictions"][0]["label"] == rows[2]["predictions"][0]["label"] == wanted[0]
    assert server.get("/v1/domains").status == 200
    assert server.get(f"/v1/domains/{guest}").status in (200, 409)
    assert server.get("/ready").status == 200


def test_a_domain_that_was_repaired_is_served_again(writable: SimpleNamespace, photo: bytes):
    server, ecology = writable.server, writable.ecology
    houses.put(ecology, "mended")
    kept = blob(ecology, "mended", "tensors").read_bytes()
    flip(blob(ecology, "mended", "tensors"))
    assert server.predict("mended", photo).status == 409
    blob(ecology, "mended", "tensors").write_bytes(kept)
    assert server.predict("mended", photo).status == 200


def test_a_domain_whose_output_is_not_finite_is_409(writable: SimpleNamespace, photo: bytes):
    """Its files are valid, but its output overflows."""
    import torch
    from small_ecology import facts

    from torch_covnorm.ecology import Details

    net = writable.ecology.network()
    houses.add(net, "endless", "residual")
    head = net.domain("endless").head
    with torch.no_grad():
        head.weight.fill_(3e38)
        head.bias.fill_(0)
    writable.ecology.put(net, {"endless": Details(facts())})
    answer = writable.server.predict("endless", photo)
    assert (answer.status, answer.reason) == (409, "broken_domain"), answer.body
    rows = writable.server.many([("stays", photo), ("endless", photo)] * 4).json["items"]
    assert [("error" in row) for row in rows] == [False, True] * 4


def test_a_damaged_manifest_keeps_the_last_known_state(writable: SimpleNamespace, photo: bytes):
    server, file = writable.server, writable.ecology.folder / MANIFEST
    houses.put(writable.ecology, "asleep")
    wait_for(lambda: server.get("/v1/domains/asleep").status == 200, "it is known, not loaded")
    wanted, good = server.predict("stays", photo).best, file.read_bytes()
    try:
        for bad in (b"", b"{", good[:-10], None):
            if bad is None:
                file.unlink()
            else:
                file.write_bytes(bad)
            for _ in range(3):
                assert server.predict("stays", photo).best == wanted
                assert server.predict("nobody", photo).status == 404
                assert server.get("/v1/domains").status == 200
                assert server.get("/v1/domains/stays").status == 200
                assert server.get("/v1/status").status == 200
                assert server.get("/ready").status == 200
                answer = server.ask("DELETE", "/v1/domains/stays")
                assert answer.status in (409, 422), answer.body
                answer = server.predict("asleep", photo, timeout=10)
                assert answer.status == 409, (
                    answer.body
                )  # it cannot be loaded, and there is no endless retry
    finally:
        file.write_bytes(good)
    assert server.predict("stays", photo).best == wanted


def test_50_bad_domain_files_under_steady_traffic_lose_no_request(
    writable: SimpleNamespace, photo: bytes
):
    server, ecology = writable.server, writable.ecology
    rng, ways = random.Random(0), list(DAMAGE.values())
    failed = 'covnorm_loads_total{result="failed"}'
    before, pid = server.metric(failed), server.worker
    answers: list[Response] = []
    with steady(server, "stays", photo, 1) as seen:
        for i in range(50):
            name = f"bad-{i}"
            houses.put(ecology, name, seed=i)
            rng.choice(ways)(ecology, name)
            answers.append(server.predict(name, photo))
            ecology.remove([name])
    assert [a.status for a in answers] == [409] * 50
    assert set(seen) == {200}, seen
    assert seen[200] > 50
    assert server.metric(failed) > before
    assert server.worker == pid  # none of them killed it


def test_a_domain_removed_under_traffic_is_404_and_nothing_else(
    writable: SimpleNamespace, photo: bytes
):
    server, ecology = writable.server, writable.ecology
    with steady(server, "stays", photo) as seen, steady(server, "coming", photo) as comes:
        for i in range(6):
            houses.put(ecology, "coming", seed=i % 2)
            wait_for(lambda: server.predict("coming", photo).status == 200, "it is served")
            ecology.remove(["coming"])
            wait_for(lambda: server.predict("coming", photo).status == 404, "it is gone")
    assert set(seen) == {200}, seen
    assert set(comes) <= {200, 404}, comes
    assert comes[200] > 5


def test_control_verify_reports_the_damage(tmp_path: Path):
    """`verify` reports each of them, too."""
    from torch_covnorm.ecology import verify

    ecology = houses.create(tmp_path / "house")
    houses.put(ecology, "guest")
    assert verify(ecology.folder, backbone=False) == []
    before = files(ecology.folder)
    for name, damage in DAMAGE.items():
        damage(ecology, "guest")
        assert verify(ecology.folder, backbone=False), name
        for path, data in before.items():
            (ecology.folder / path).write_bytes(data)
    forge(ecology.folder, lambda manifest: manifest["domains"].clear())
    assert ecology.domains == {}
