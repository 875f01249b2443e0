"""Clients that disconnect, are slow, or do not speak HTTP get 4xx and disturb nobody else."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import time
from collections.abc import Iterator

import pytest
from server import Server, form, running, wait_for

from torch_covnorm.ecology import Ecology

PREDICT = "/v1/domains/roses/predict"
SLOW = 2.0


@pytest.fixture(scope="module")
def strict(house: Ecology) -> Iterator[Server]:
    """A server with a short timeout for bodies."""
    with running(house.folder, limits={"upload": SLOW, "deadline": 30.0}) as server:
        yield server


def opened(server: Server, *parts: bytes) -> socket.socket:
    """Open a connection and send these bytes."""
    made = socket.create_connection((server.host, server.port), timeout=60)
    for part in parts:
        made.sendall(part)
    return made


def head(length: object, *more: str, method: str = "POST", path: str = PREDICT) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def rest_of(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_a_client_that_disconnects_during_its_upload_harms_nobody(server: Server, photo: bytes):
    before = server.metric('covnorm_requests_total{route="other",status="500"}')
    for _ in range(20):
        opened(server, head(len(photo)), photo[:100]).close()
    body, headers = form([("image", "a.png", photo)])
    for _ in range(10):
        header = f"Content-Type: {headers['Content-Type']}"
        opened(server, head(len(body), header), body[:150]).close()
    assert server.predict("roses", photo).status == 200
    wait_for(lambda: server.metric("covnorm_queue_depth") == 0, "nothing is held for them")
    assert server.metric('covnorm_requests_total{route="other",status="500"}') == before
    assert not [line for line in server.lines() if line["level"] == "error"]


def test_a_client_that_disconnects_before_its_response_harms_nobody(server: Server, photo: bytes):
    for _ in range(20):
        opened(server, head(len(photo)), photo).close()
    assert server.predict("roses", photo).status == 200
    wait_for(lambda: server.metric("covnorm_queue_depth") == 0, "nothing is held for them")
    assert not [line for line in server.lines() if line["level"] == "error"]


def test_a_slow_client_gets_408(strict: Server, photo: bytes):
    body, headers = form([("image", "a.png", photo)])
    lines = ["Content-Type: image/png", f"Content-Type: {headers['Content-Type']}"]
    for data, line in zip((photo, body), lines, strict=True):
        start = time.monotonic()
        with opened(strict, head(len(data), line), data[:120]) as slow:
            assert strict.predict("roses", photo).status == 200  # meanwhile
            assert status(rest_of(slow)) == 408
        assert time.monotonic() - start > 0.8 * SLOW


def test_a_client_that_sends_byte_by_byte_gets_408(strict: Server, photo: bytes):
    with opened(strict, head(len(photo))) as slow:
        slow.settimeout(0.1)
        start = time.monotonic()
        answer = b""
        for i in range(600):  # a byte now and then does not extend the timeout
            try:
                slow.sendall(photo[i : i + 1])
                answer = slow.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            break
        assert status(answer) == 408
        assert time.monotonic() - start < 30


def test_a_connection_with_half_a_header_is_closed(strict: Server, photo: bytes):
    """Otherwise idle clients could use up all connections."""
    for part in (b"", b"POST /v1/domains/ro", head(10)[:-4]):
        start = time.monotonic()
        with opened(strict, part) as idle:
            assert strict.predict("roses", photo).status == 200
            assert status(rest_of(idle)) in (0, 408)
        assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "sent",
    [
        head("9" * 5000),
        head("-1"),
        head("1e3"),
        head("²"),
        head("5", "Content-Length: 6"),
        head("5", "Transfer-Encoding: chunked"),
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://elsewhere/live HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET " + b"/a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n" * 1000 + b"\x00\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:30]),
)
def test_bytes_that_are_not_http_are_4xx_or_closed(sent: bytes, strict: Server, photo: bytes):
    with opened(strict, sent) as odd:
        with contextlib.suppress(OSError):  # it may be closed already
            odd.shutdown(socket.SHUT_WR)
        assert status(rest_of(odd)) in {0, *range(400, 500)}
    assert strict.predict("roses", photo).status == 200


def test_the_wrong_kind_of_body_is_415_or_422(server: Server, photo: bytes):
    for path in (PREDICT, "/v1/predict"):
        for media_type in ("text/plain", "application/xml", "application/x-www-form-urlencoded"):
            assert server.ask("POST", path, photo, {"Content-Type": media_type}).status == 415
    odd = [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=x",
    ]
    for media_type in [
        *odd,
        "multipart/form-data; boundary=" + "b" * 300,
        "multipart/form-data; x; y==",
    ]:
        for path in (PREDICT, "/v1/predict"):
            answer = server.ask("POST", path, photo, {"Content-Type": media_type})
            assert answer.status in (400, 422), (media_type, answer.body)
            assert answer.reason == "invalid"


def test_a_form_without_the_right_fields_is_422(server: Server, photo: bytes):
    wrong = [
        [],
        [("picture", "a.png", photo)],
        [("image", None, b"text, no file")],
        [("image", "a", photo), ("image", "b", photo)],
    ]
    for parts in wrong:
        body, headers = form(parts)
        assert server.ask("POST", PREDICT, body, headers).status in (400, 422)
    many = [
        [("image", "a", photo)],
        [("domain", None, b"roses")],
        [("image", "a", photo), ("domain", None, b"roses"), ("domain", None, b"coins")],
        [("image", "a", photo), ("domain", "file", b"roses")],
        [("image", "a", b"x")] * 300 + [("domain", None, b"roses")],
    ]
    for parts in many:
        body, headers = form(parts)
        assert server.ask("POST", "/v1/predict", body, headers).status in (400, 413, 422)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"{",
        b"[]",
        b'{"items": []}',
        b'{"items": [{}]}',
        b'{"items": [{"domain": "roses"}]}',
        b'{"items": [{"domain": 5, "image": "aaaa"}]}',
        b'{"items": [{"domain": "../roses", "image": "aaaa"}]}',
        b'{"items": [{"domain": "roses", "image": "aaaa", "extra": 1}]}',
        b'{"items": "x", "more": 1}',
        b'{"items": ' + b"[" * 1_000,
        b"\xff\xfe\x00",
        b'{"items": [{"domain": "\\ud800", "image": ""}]}',
        b'{"items": [{"domain": "roses", "image": NaN}]}',
    ],
    ids=repr,
)
def test_wrong_json_is_422(sent: bytes, server: Server):
    answer = server.ask("POST", "/v1/predict", sent, {"Content-Type": "application/json"})
    assert (answer.status, answer.reason) == (422, "invalid"), answer.body


@pytest.mark.parametrize(
    "body",
    [
        b'{"items":[' + b"{}," * 400_000 + b"{}]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}",
        b'{"items":[' + b"1," * 4_000_000 + b"1]}",
        b"[" * 1_000_000,
    ],
    ids=["empty items", "unknown keys", "numbers", "brackets"],
)
def test_a_million_tiny_items_are_413_at_once(body: bytes, server: Server):
    """Parsing them would block the event loop for seconds and take gigabytes."""
    before, start = server.rss(server.process.pid), time.monotonic()
    answer = server.ask("POST", "/v1/predict", body, {"Content-Type": "application/json"})
    assert (answer.status, answer.reason) == (413, "too_many")
    assert time.monotonic() - start < 2
    assert server.rss(server.process.pid) - before < 100_000_000


def test_only_the_image_that_is_not_base64_fails(server: Server):
    items = [{"domain": "roses", "image": text} for text in ("*", "é", "a", "YWJj")]
    body = json.dumps({"items": items}).encode()
    answer = server.ask("POST", "/v1/predict", body, {"Content-Type": "application/json"})
    assert answer.status == 200
    assert [row["error"]["reason"] for row in answer.json["items"]] == ["bad_image"] * 4


def test_a_kept_connection_has_no_delayed_packets(server: Server):
    """Nagle's algorithm would delay every response by 40 ms."""
    connection, took = server.connect(), []
    for _ in range(21):
        start = time.monotonic()
        connection.request("GET", "/live")
        connection.getresponse().read()
        took.append(time.monotonic() - start)
    connection.close()
    assert statistics.median(took) < 0.03


def test_every_response_and_its_log_line_have_the_request_id(server: Server, photo: bytes):
    for given in ("abc-1.2_3", None, "not an id", "x" * 65, "\xe9"):
        headers = {} if given is None else {"X-Request-ID": given}
        answer = server.predict("roses", photo, headers=headers)
        found = answer.headers["x-request-id"]
        assert found == answer.json["request"]
        assert (found == given) == (given == "abc-1.2_3")
        wanted = f'"request": "{found}"'
        wait_for(lambda wanted=wanted: wanted in server.log_text(), "its line is in the log")
        (line,) = [x for x in server.lines() if x.get("request") == found]
        assert line["route"] == "/v1/domains/{name}/predict"
        assert (line["status"], line["method"]) == (200, "POST")
