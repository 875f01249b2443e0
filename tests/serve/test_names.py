"""Names in requests are looked up in the manifest and never become part of a path."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from server import Server, form
from small_ecology import files

ODD = [
    "..",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "..%5c..%5cwindows",
    "%2fetc%2fpasswd",
    "/etc/passwd",
    "C%3a%5cboot",
    "ecology.json",
    "blobs",
    "stays%00",
    "stays%00.png",
    "%00",
    "stays%0a",
    "stays%20",
    "%20stays",
    "Stays",
    "st%C3%A4ys",
    "%EF%BD%93tays",
    "%ff%fe",
    "%F0%9F%98%80",
    "%E2%80%AE",
    ".stays",
    "-stays",
    "_",
    "stays%2fpredict",
    "*",
    "%3Cscript%3E",
    "'%20or%201=1",
    "a" * 65,
    "a" * 5000,
    "%2e" * 2000,
]


@pytest.mark.parametrize("name", ODD, ids=lambda name: name[:20])
def test_path_tricks_in_a_name_are_4xx_on_every_route(
    name: str, writable: SimpleNamespace, photo: bytes
):
    server, folder = writable.server, writable.ecology.folder
    before = files(folder)
    body, headers = form([("file", "domain.json", b"{}")])
    answers = [
        server.predict(name, photo),
        server.get(f"/v1/domains/{name}"),
        server.ask("PUT", f"/v1/domains/{name}", body, headers),
        server.ask("DELETE", f"/v1/domains/{name}"),
    ]
    for answer in answers:
        assert 400 <= answer.status < 500, answer.body
        assert b"root:" not in answer.body
        assert b"checksum" not in answer.body
        assert str(folder).encode() not in answer.body
    assert files(folder) == before
    assert server.predict("stays", photo).status == 200


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "\0", "stays\0", "ü", "a" * 500_000, "", "stays/../stays"]
)
def test_path_tricks_in_a_body_are_unknown_domains(name: str, server: Server, photo: bytes):
    body, headers = form([("domain", None, name.encode()), ("image", "a", photo)])
    answer = server.ask("POST", "/v1/predict", body, headers)
    assert answer.status == 200
    (row,) = answer.json["items"]
    assert row["error"]["reason"] == "unknown_domain"
    assert len(answer.body) < 5000
    assert server.many([(name, photo)]).status == 422


def test_a_query_or_header_cannot_name_a_file(server: Server, photo: bytes):
    answer = server.predict("roses?top=1&name=../../etc/passwd&domain=coins", photo)
    assert answer.status in (404, 405)
    answer = server.predict("roses", photo, headers={"X-Domain": "coins", "Host": "../../etc"})
    assert answer.json["domain"] == "roses"


UPLOADED = [
    "../domain.json",
    "../../../../tmp/covnorm-escaped.json",
    "/tmp/covnorm-escaped.json",
    "..\\\\domain.json",
    "basis/../../domain.json",
    "..",
    ".",
    "",
    "basis",
    "basis/",
    "basis/basis",
    "domain.json/x",
    "a" * 300 + ".json",
    "basis/" + "a" * 300 + ".safetensors",
    "tensors-\0.safetensors",
    "tensörs.safetensors",
    "日本.json",
    ".domain.json",
    "domain.json\t",
    "con",
]


@pytest.mark.parametrize("name", UPLOADED, ids=lambda name: repr(name[:24]))
def test_the_file_names_of_an_upload_cannot_escape_its_folder(name: str, writable: SimpleNamespace):
    server, folder = writable.server, writable.ecology.folder
    before = files(folder)
    around = sorted(p.name for p in folder.parent.iterdir())
    body, headers = form([("file", name, b"{}"), ("file", "basis/x.json", b"{}")])
    answer = server.ask("PUT", "/v1/domains/uploaded", body, headers)
    assert answer.status in (400, 409, 422), answer.body
    assert files(folder) == before
    assert sorted(p.name for p in folder.parent.iterdir()) == around
    assert not Path("/tmp/covnorm-escaped.json").exists()


def test_a_message_shows_no_path_of_the_server(writable: SimpleNamespace):
    body, headers = form([("file", "domain.json", b"{}")])
    for parts in (body, form([])[0], form([("file", "domain.json", b'{"format": 1}')])[0]):
        answer = writable.server.ask("PUT", "/v1/domains/uploaded", parts, headers)
        assert answer.status in (409, 422)
        assert "tmp" not in answer.message, answer.message
        assert str(writable.ecology.folder) not in answer.message


def test_auto_is_not_allowed_as_a_domain_name(writable: SimpleNamespace):
    body, headers = form([("file", "domain.json", b"{}")])
    answer = writable.server.ask("PUT", "/v1/domains/auto", body, headers)
    assert answer.status == 422
    assert "auto" in answer.message
