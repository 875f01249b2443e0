"""`auto`: the server names the domain, by the statistics that every domain keeps."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import houses
import numpy as np
import pytest
from houses import SAMPLES
from server import Server, running, wait_for
from small_ecology import content

from torch_covnorm import records
from torch_covnorm.data import load_sample
from torch_covnorm.data.image_files import load_image
from torch_covnorm.ecology import Ecology
from torch_covnorm.ecology.manifest import FORMAT, MANIFEST
from torch_covnorm.serve.guess import Guesser


def test_auto_names_the_domain_of_images_it_has_not_seen(server: Server):
    right = 0
    for name in SAMPLES:
        for i in range(10):
            answer = server.predict("auto", houses.picture(name, i))
            assert answer.status in (200, 422), answer.body
            if answer.status == 200:
                right += answer.json["domain"] == name
    assert right >= 27, right


def test_the_answer_is_that_of_the_domain_it_named(server: Server):
    for name in SAMPLES:
        image = houses.picture(name, 1)
        guessed = server.predict("auto", image)
        asked = server.predict(guessed.json["domain"], image)
        assert guessed.best[0] == asked.best[0]
        assert guessed.best[1] == pytest.approx(asked.best[1], abs=1e-5)
        assert 0 < guessed.json["confidence"] <= 1
        assert asked.json["confidence"] is None
        listed = guessed.json["candidates"]
        assert listed[0]["domain"] == guessed.json["domain"]
        assert {row["domain"] for row in listed} == set(SAMPLES)  # the others keep none


def test_it_says_so_when_none_fits(server: Server):
    answer = server.predict("auto", houses.stripes())
    assert (answer.status, answer.reason) == (422, "no_domain_fits"), answer.body
    assert "name the domain" in answer.message
    rows = server.many([("auto", houses.stripes()), ("auto", houses.picture("digits", 1))])
    first, second = rows.json["items"]
    assert first["error"]["reason"] == "no_domain_fits"
    assert second["domain"] == "digits"


def test_a_bad_image_is_422_here_too(server: Server):
    answer = server.predict("auto", b"no image")
    assert (answer.status, answer.reason) == (422, "bad_image")


def test_an_ecology_without_statistics_says_so(writable: SimpleNamespace, photo: bytes):
    answer = writable.server.predict("auto", photo)
    assert (answer.status, answer.reason) == (422, "no_domain")


def test_a_new_domain_is_learned_and_a_removed_one_forgotten(writable: SimpleNamespace):
    server, ecology = writable.server, writable.ecology
    image = houses.picture("sketches", 2)
    houses.known(ecology, "digits", load_sample("digits").x_train[:64])
    wait_for(lambda: server.predict("auto", houses.picture("digits", 2)).status == 200, "digits")
    houses.known(ecology, "sketches", load_sample("sketches").x_train[:64])
    wait_for(lambda: server.predict("auto", image).json.get("domain") == "sketches", "sketches")
    ecology.remove(["sketches"])
    wait_for(lambda: server.predict("auto", image).json.get("domain") != "sketches", "forgotten")


def test_a_domain_that_comes_back_with_statistics_is_learned(writable: SimpleNamespace):
    """It was known as one that keeps none."""
    server, ecology = writable.server, writable.ecology
    image = houses.picture("digits", 2)
    houses.put(ecology, "digits", adapter="residual")
    assert server.predict("auto", image).reason == "no_domain"
    net = ecology.network()
    ecology.load(net, "digits")
    ecology.remove(["digits"])
    houses.known(ecology, "digits", load_sample("digits").x_train[:64])
    wait_for(lambda: server.predict("auto", image).status == 200, "it is known now")


def test_domains_that_come_and_go_make_no_error(writable: SimpleNamespace):
    """Learning and forgetting go on beside the guessing."""
    server, ecology = writable.server, writable.ecology
    sample, image = load_sample("digits").x_train[:32], houses.picture("digits", 2)
    houses.known(ecology, "digits", sample)
    wait_for(lambda: server.predict("auto", image).status == 200, "it is known")
    ends = time.monotonic() + 4

    def client(_: int) -> set[int]:
        seen = set()
        while time.monotonic() < ends:
            seen.add(server.predict("auto", image).status)
        return seen

    with ThreadPoolExecutor(5) as pool:
        clients = [pool.submit(client, i) for i in range(4)]
        i = 0
        while i < 4 or time.monotonic() < ends:
            houses.known(ecology, f"more-{i % 3}", sample)
            ecology.remove([f"more-{i % 3}"])
            i += 1
        seen = set().union(*(c.result() for c in clients))
    assert seen <= {200, 404}, seen  # 404: it went between the guess and the answer


def test_many_guesses_stand_in_nobody_elses_way(house: Ecology, tmp_path: Path, photo: bytes):
    """Where a guess takes long, many of them are refused or late; named domains are answered."""
    copy = Ecology(shutil.copytree(house.folder, tmp_path / "copy"))
    file = copy.folder / MANIFEST
    made = content(json.loads(file.read_bytes()))
    for i in range(30):
        made["domains"][f"digits-{i}"] = made["domains"]["digits"]
    file.write_bytes(records.sealed(FORMAT, made, indent=None))
    with running(copy.folder, "--deadline", 2) as server:
        wait_for(lambda: server.predict("auto", photo).status in (200, 422), "they are learned")
        wait_for(lambda: server.predict("roses", photo).status == 200, "it is loaded")
        with ThreadPoolExecutor(1) as pool:
            many = pool.submit(server.many, [("auto", photo)] * 64)
            named = [server.predict("roses", photo).status for _ in range(12)]
            rows = many.result().json["items"]
        assert named == [200] * 12
        refused = [row["error"]["reason"] for row in rows if "error" in row]
        assert {"queue_full", "deadline", "no_domain_fits"} >= set(refused)
        assert refused.count("queue_full") + refused.count("deadline") > 10, "no guess was slow"
        assert server.predict("roses", photo).status == 200
        assert server.get("/v1/status").json["workers"][0]["restarts"] == 0


def test_the_guesser_keeps_little_of_a_domain(house: Ecology):
    guesser = Guesser(house)
    guesser.learn({"digits": "1"})
    (known,) = (guesser.net.domain(name) for name in guesser.net.domains)
    assert known.bytes < house.load(house.network(), "digits").bytes / 5


def test_names_that_differ_by_a_number_are_all_learned(tmp_path: Path):
    house, names = houses.create(tmp_path / "house"), ("digits", "digits-0", "digits-1")
    for name in names:
        houses.known(house, name, load_sample("digits").x_train[:32])
    guesser = Guesser(house)
    guesser.learn(dict.fromkeys(names, "1"))
    image = load_image(houses.picture("digits", 1), 32, "squash").numpy()
    found = guesser.guess(dict.fromkeys(names, "32"), {"32": image})
    assert {f["domain"] for f in found} == set(names)


def test_a_domain_that_is_forgotten_while_it_is_guessed_costs_nobody_else(house: Ecology):
    """It goes at the worst moment: when its image is taken, just before its layers are."""
    guesser = Guesser(house)
    guesser.learn(dict.fromkeys(SAMPLES, "1"))
    others = SAMPLES[1:]
    image = load_image(houses.picture(others[0], 1), 32, "squash").numpy()

    class Images(dict[str, np.ndarray]):
        def __getitem__(self, key: str) -> np.ndarray:
            guesser.learn(dict.fromkeys(others, "1"))
            return super().__getitem__(key)

    sizes = dict.fromkeys(SAMPLES, "32")
    assert {f["domain"] for f in guesser.guess(sizes, {"32": image})} == set(SAMPLES)
    found = guesser.guess(sizes, Images({"32": image}))
    assert found[0]["domain"] == others[0]
    assert {f["domain"] for f in found} == set(others)


def test_damaged_statistics_cost_only_the_domain_that_has_them(writable: SimpleNamespace):
    server, ecology = writable.server, writable.ecology
    for name in ("digits", "sketches"):
        houses.known(ecology, name, load_sample(name).x_train[:64])
    file = ecology.blobs.path(ecology.entry("digits").blobs["moments"])
    file.write_bytes(file.read_bytes()[:-8])
    image = houses.picture("sketches", 2)
    wait_for(lambda: server.predict("auto", image).json.get("domain") == "sketches", "guessed")
    assert server.predict("digits", image).status == 200


def test_guessing_changes_no_answer_of_a_named_domain(server: Server):
    image = houses.picture("clipart", 4)
    alone = {name: server.predict(name, image).json["predictions"] for name in SAMPLES}
    with ThreadPoolExecutor(8) as pool:
        autos = [pool.submit(server.predict, "auto", image) for _ in range(24)]
        named = [(n, pool.submit(server.predict, n, image)) for n in SAMPLES * 8]
        assert {a.result().json["domain"] for a in autos} == {"clipart"}
        for name, asked in named:
            for a, b in zip(asked.result().json["predictions"], alone[name], strict=True):
                assert a["label"] == b["label"]
                assert a["probability"] == pytest.approx(b["probability"], abs=1e-5)
