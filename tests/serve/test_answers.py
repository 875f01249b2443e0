"""Every image is predicted by its domain, exactly as `covnorm predict` does it."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command import covnorm
from houses import DOMAINS, picture
from server import Response, Server, form

from torch_covnorm.ecology import Ecology

CLOSE = 1e-5
TESTED = (*DOMAINS, "north", "south")
Truth = dict[tuple[str, str], list[tuple[str, float]]]


@functools.cache
def files() -> dict[str, bytes]:
    """Return real images of several formats and shapes."""
    return {
        "clipart.png": picture("clipart", 3),
        "clipart.jpg": picture("clipart", 5, "JPEG"),
        "digit.png": picture("digits", 3),
        "sketch.webp": picture("sketches", 7, "WEBP"),
    }


def top(rows: list[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(row["label"], row["probability"]) for row in rows]


def assert_same(found: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> None:
    """Check for the same best label and the same probabilities."""
    assert found[0][0] == wanted[0][0]
    assert len(found) == len(wanted)
    assert dict(found) == pytest.approx(dict(wanted), abs=CLOSE, rel=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for name, data in files().items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def truth(house: Ecology, saved: Path) -> Truth:
    """The output of `covnorm predict` for every image and every domain."""
    found = {}
    for domain in TESTED:
        paths = [saved / name for name in files()]
        ran = covnorm("predict", domain, *paths, "--ecology", house.folder, "--top", 99, "--json")
        for name, row in zip(files(), ran.json, strict=True):
            found[domain, name] = top(row["top"])
    return found


def mixed(truth: Truth, seed: int, n: int = 24) -> list[tuple[str, str]]:
    """Return [(domain, image)] in random order, with duplicates."""
    return random.Random(seed).choices(sorted(truth), k=n)


def test_a_mixed_batch_over_http_equals_covnorm_predict(server: Server, truth: Truth):
    domains_per_batch = set()
    for seed in range(4):
        items = mixed(truth, seed)
        answer = server.many([(d, files()[i]) for d, i in items])
        assert answer.status == 200
        for item, row in zip(items, answer.json["items"], strict=True):
            assert row["domain"] == item[0]
            assert_same(top(row["predictions"]), truth[item])
            domains_per_batch.add(row["batch"]["domains"])
    assert max(domains_per_batch) > 2  # they did share batches


def test_the_command_in_a_second_process_predicts_the_same(
    house: Ecology, saved: Path, server: Server
):
    """Other tests call the command inside the test process; this one starts a new process."""
    running = {}
    for domain in ("roses", "leaves"):
        words = ["-m", "torch_covnorm", "predict", domain, *map(str, saved.iterdir())]
        words += ["--ecology", str(house.folder), "--json", "--top", "99", "--threads", "1"]
        running[domain] = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE)
    for domain, process in running.items():
        out, _ = process.communicate(timeout=100)
        rows = json.loads(out)
        assert len(rows) == len(files())
        for row in rows:
            answer = server.predict(domain, Path(row["file"]).read_bytes(), top=99)
            assert_same(top(answer.json["predictions"]), top(row["top"]))


def test_control_the_wrong_domain_predicts_something_else(server: Server, truth: Truth):
    """Otherwise the tests above would pass on a server that confuses domains."""
    for image in files():
        for wrong in ("north", "coins"):
            answer = server.predict(wrong, files()[image], top=99)
            right = truth["south", image]
            found = [p for _, p in top(answer.json["predictions"])]
            assert [p for _, p in right] != pytest.approx(found, abs=100 * CLOSE)
    labels = {domain: {label for label, _ in rows} for (domain, _), rows in truth.items()}
    assert len(labels) == len(TESTED) == 8
    assert all(not labels[a] & labels[b] for a in labels for b in labels if a != b)


@pytest.mark.parametrize("domain", ["roses", "shells", "moths", "coins", "leaves", "north"])
def test_a_single_image_equals_covnorm_predict(domain: str, server: Server, truth: Truth):
    for image, data in files().items():
        answer = server.predict(domain, data, top=99)
        assert_same(top(answer.json["predictions"]), truth[domain, image])


def test_bytes_form_and_json_give_the_same_predictions(server: Server, photo: bytes):
    body, headers = form([("image", "any name.png", photo)])
    formed = server.ask("POST", "/v1/domains/roses/predict", body, headers)
    body, headers = form([("domain", None, b"roses"), ("image", "a", photo), ("image", "b", photo)])
    several = server.ask("POST", "/v1/predict", body, headers)
    wanted = server.predict("roses", photo).json["predictions"]
    listed = server.many([("roses", photo)], top=5).json["items"]
    for answer in (formed.json, *several.json["items"], *listed):
        assert_same(top(answer["predictions"]), top(wanted))
    assert len(several.json["items"]) == 2


def test_top_gives_that_many_predictions_best_first(server: Server, photo: bytes):
    for n, wanted in ((None, 5), (1, 1), (3, 3), (10, 10), (10**30, 10)):
        found = top(server.predict("roses", photo, top=n).json["predictions"])
        assert len(found) == wanted
        assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)
    for bad in (0, -1, "x"):
        assert server.predict("roses", photo, top=bad).status == 422  # type: ignore[arg-type]


def test_an_unknown_domain_is_404_never_the_bare_backbone(server: Server, photo: bytes):
    answer = server.predict("rose", photo)
    assert (answer.status, answer.reason) == (404, "unknown_domain")
    assert "'roses'" in answer.message  # the nearest name
    assert "predictions" not in answer.json


def test_an_unknown_domain_in_a_batch_does_not_fail_the_others(
    server: Server, truth: Truth, photo: bytes
):
    items = [("roses", "digit.png"), ("nobody", "digit.png"), ("south", "clipart.jpg")]
    answer = server.many([(d, files()[i]) for d, i in items])
    first, second, third = answer.json["items"]
    assert answer.status == 200
    assert second == {"domain": "nobody", "error": second["error"]}
    assert second["error"]["reason"] == "unknown_domain"
    assert_same(top(first["predictions"]), truth[items[0]])
    assert_same(top(third["predictions"]), truth[items[2]])


def test_a_bad_image_in_a_batch_does_not_fail_the_others(server: Server, truth: Truth):
    good = files()["digit.png"]
    answer = server.many([("roses", b"no image"), ("roses", good), ("coins", b"")])
    first, second, third = answer.json["items"]
    assert first["error"]["reason"] == third["error"]["reason"] == "bad_image"
    assert_same(top(second["predictions"]), truth["roses", "digit.png"])


def test_16_threads_with_random_domains_equal_the_serial_predictions(server: Server, truth: Truth):
    def client(seed: int) -> list[tuple[tuple[str, str], Response]]:
        return [
            (item, server.predict(item[0], files()[item[1]], 99)) for item in mixed(truth, seed, 12)
        ]

    with ThreadPoolExecutor(16) as pool:
        answers = [pair for found in pool.map(client, range(16)) for pair in found]
    assert len(answers) == 16 * 12
    shared = 0
    for item, answer in answers:
        assert answer.status == 200, answer.body
        assert answer.json["domain"] == item[0]
        assert_same(top(answer.json["predictions"]), truth[item])
        shared += answer.json["batch"]["domains"] > 1
    assert shared > 16  # domains shared batches


def test_too_many_images_in_one_request_are_413(server: Server, photo: bytes):
    assert server.many([("roses", photo)] * 64).status == 200
    answer = server.many([("roses", photo)] * 65)
    assert (answer.status, answer.reason) == (413, "too_many")
