"""Access: loopback by default, no writes by default, and only with a key if keys are set."""

from __future__ import annotations

import base64
import hmac
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import covnorm
from server import Server
from starlette.datastructures import Headers

from torch_covnorm import CovNormError
from torch_covnorm.ecology import Ecology
from torch_covnorm.serve import Keys, Limits
from torch_covnorm.serve.guard import OPEN
from torch_covnorm.serve.server import make_app

KEY, SECOND = "correct-horse-battery", "staple-0123456789abcdef"


@pytest.fixture(scope="module")
def locked(house: Ecology, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# ours\n{KEY}\n\n  {SECOND}  \n")
    server = Server(house.folder, "--keys", file, "--allow-writes")
    try:
        yield server
    finally:
        server.kill()


def ways(key: str) -> list[dict[str, str]]:
    """Return the headers that can carry a key."""
    basic = base64.b64encode(f"any:{key}".encode()).decode()
    return [
        {"Authorization": f"Bearer {key}"},
        {"X-API-Key": key},
        {"Authorization": f"Basic {basic}"},
    ]


def routes(house: Ecology) -> list[tuple[str, str]]:
    """Return [(method, path)] of every route, those that FastAPI adds included."""
    app = make_app(house, Limits(), allow_writes=True)
    found = []
    for route in app.routes:
        for method in sorted(getattr(route, "methods", None) or {"GET"}):
            found.append((method, route.path.replace("{name}", "roses")))  # type: ignore[attr-defined]
    return found


def test_every_route_except_live_needs_a_key(locked: Server, house: Ecology):
    """The routes come from the application, so new ones are tested automatically."""
    asked = routes(house)
    assert {"/", "/ready", "/metrics", "/v1/predict", "/openapi.json"} <= {p for _, p in asked}
    assert ("PUT", "/v1/domains/roses") in asked
    assert ("DELETE", "/v1/domains/roses") in asked
    assert {"/live"} == OPEN
    wrong = [{}, *ways("wrong-key-of-some-length"), *ways(""), *ways(KEY[:-1]), *ways(KEY + "x")]
    wrong += [{"Authorization": f"Digest {KEY}"}, {"Authorization": KEY}, {"X-Key": KEY}]
    wrong += [{"Authorization": "Basic ***"}, {"Authorization": "Basic /w=="}, {"Cookie": KEY}]
    for method, path in [*asked, ("GET", "/nothing"), ("POST", "/live/"), ("GET", "//live")]:
        for headers in wrong if method != "HEAD" else wrong[:1]:
            answer = locked.ask(method, path, headers=headers)
            if path in OPEN:
                assert answer.status in (200, 405)
                continue
            assert answer.status == 401, (method, path, headers)
            assert answer.headers["www-authenticate"].startswith("Basic")
            assert method == "HEAD" or answer.reason == "no_key"
    assert "roses" in house.domains


def test_the_right_key_is_accepted_in_every_header(locked: Server, photo: bytes):
    for key in (KEY, SECOND):
        for headers in ways(key):
            assert locked.get("/v1/domains", **headers).status == 200
            assert locked.predict("roses", photo, headers=headers).status in (200, 504)
    assert locked.get("/live").status == 200


def test_the_key_is_checked_before_the_body_is_read(locked: Server):
    answer = locked.predict("roses", bytes(100_000_000), headers={"X-API-Key": "wrong" * 5})
    assert answer.status == 401


def test_no_key_is_in_the_log(locked: Server):
    for headers in [*ways(KEY), *ways("wrong-key-of-some-length")]:
        locked.get("/v1/domains?key=" + SECOND, **headers)
    log = locked.log_text()
    assert "/v1/domains" in log
    assert KEY not in log
    assert SECOND not in log
    assert "wrong-key" not in log


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    """Every key is compared, as a digest of fixed length, with `hmac.compare_digest`."""
    seen = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return original(a, b)

    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys([KEY, SECOND, "third-key-of-this-test"])
    for given, wanted in ((KEY, True), (SECOND, True), ("x", False), ("", False)):
        seen.clear()
        assert keys.allow(Headers({"x-api-key": given})) is wanted
        assert seen == [(32, 32)] * 3


def test_an_invalid_keys_file_is_an_error(tmp_path: Path):
    file = tmp_path / "keys"
    for text, why in (("", "no key"), ("# x\n", "no key"), ("short\n", "16"), ("ß" * 20, "ASCII")):
        file.write_text(text)
        with pytest.raises(CovNormError, match=why) as error:
            Keys.read(file)
        assert str(file) in str(error.value)
        assert text.strip("# \n") in ("", "x") or text.strip() not in str(error.value)
    with pytest.raises(CovNormError, match="nowhere"):
        Keys.read(tmp_path / "nowhere")


def test_it_listens_on_loopback_by_default(server: Server):
    assert server.host == "127.0.0.1"
    inode = {p.readlink().name for p in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    sockets = {i[8:-1] for i in inode if i.startswith("socket:")}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                listening.append(words[1].split(":")[0])
    assert listening == ["0100007F"]


def test_a_port_that_is_taken_is_an_error_that_names_it(house: Ecology):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = covnorm("serve", house.folder, "--port", port)
    assert ran.code == 2
    assert f"127.0.0.1:{port}" in ran.err


def test_write_routes_are_off_by_default(server: Server, house: Ecology):
    for method in ("PUT", "DELETE", "POST", "PATCH"):
        assert server.ask(method, "/v1/domains/roses").status in (404, 405)
        assert server.ask(method, "/v1/domains").status in (404, 405)
    assert "roses" in house.domains
    paths = server.get("/openapi.json").json["paths"]
    assert set(paths["/v1/domains/{name}"]) == {"get"}
