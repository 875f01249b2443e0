"""The OpenAPI document is true: schemathesis finds no 5xx and nothing undocumented."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import houses
import pytest
from server import Server

from torch_covnorm.serve.schemas import Items, Predicted

CONFIG = """
[[operations]]
include-name = "POST /v1/domains/{name}/predict"
parameters = { name = "stays" }
"""
# Random bytes are rejected by the decoder, so real images are sent, too.
CODE = """
import sys
from pathlib import Path

from hypothesis import strategies as st
from schemathesis import openapi
from schemathesis.cli import schemathesis

images = st.just(Path("photo.png").read_bytes()) | st.binary()
openapi.media_type("application/octet-stream", images)
sys.exit(schemathesis())
"""
PREDICTED = 'covnorm_requests_total{route="/v1/domains/{name}/predict",status="200"}'


@pytest.fixture
def document(writable: SimpleNamespace) -> dict[str, Any]:
    return writable.server.get("/openapi.json").json


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_schemathesis_passes_with_no_5xx(
    writable: SimpleNamespace, document: dict[str, Any], photo: bytes, tmp_path: Path
):
    """Run all of its checks but one: that bytes which are not an image are accepted."""
    server: Server = writable.server
    houses.put(writable.ecology, "digits")
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    (tmp_path / "photo.png").write_bytes(photo)
    before = server.metric(PREDICTED)
    words = ["run", f"{server.address}/openapi.json", "--seed", "1", "--max-examples", "20"]
    words += ["--phases", "examples,coverage,fuzzing", "--checks", "all"]
    words += ["--exclude-checks", "positive_data_acceptance", "--no-color"]
    ran = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    count = len(list(operations(document)))
    assert count > 10
    assert f"Tested: {count}" in ran.stdout
    cases = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert cases is not None
    assert int(cases[1]) == int(cases[2]) > 200
    assert server.metric(PREDICTED) > before
    failed = [
        series
        for series in server.metrics()
        if re.search('status="5', series) and "/ready" not in series
    ]
    assert failed == []


def test_every_reference_can_be_resolved(document: dict[str, Any]):
    found = list(references(document))
    assert found
    for reference in found:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_every_route_documents_what_it_does_and_its_errors(document: dict[str, Any]):
    for method, path, operation in operations(document):
        assert operation["description"], (method, path)
        errors = {s: r for s, r in operation["responses"].items() if s >= "400"}
        assert {"400", "401", "408", "413"} <= set(errors), (method, path)
        for response in errors.values():
            (media_type,) = response["content"]
            assert media_type == "application/json", (method, path)


def test_the_examples_are_true(writable: SimpleNamespace, document: dict[str, Any]):
    server: Server = writable.server
    houses.put(writable.ecology, "digits")
    body = document["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]
    item = body["schema"]["properties"]["items"]["items"]["example"]
    asked = json.dumps({"items": [item]}).encode()
    answer = server.ask("POST", "/v1/predict", asked, {"Content-Type": "application/json"})
    assert answer.json["items"][0]["domain"] == "digits"
    assert "predictions" in answer.json["items"][0], answer.body
    assert body["schema"]["properties"].keys() == Items.model_fields.keys()
    shown = document["components"]["schemas"]["Predicted"]["example"]
    assert Predicted(**shown).model_dump(exclude_unset=True) == shown
    assert shown.keys() | {"candidates", "confidence"} == answer.json["items"][0].keys()


def test_405_lists_the_allowed_methods(writable: SimpleNamespace, server: Server):
    for who, path, wanted in (
        (writable.server, "/v1/domains/stays", "DELETE, GET, PUT"),
        (server, "/v1/domains/roses", "GET"),
        (server, "/v1/predict", "POST"),
    ):
        answer = who.ask("PATCH", path)
        assert answer.status == 405
        assert answer.headers["allow"] == wanted
