"""PUT and DELETE: an exported domain can be uploaded and gives the same predictions."""

from __future__ import annotations

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import houses
import pytest
import safetensors.torch
import torch
from command import covnorm
from server import Server, form
from small_ecology import assert_tidy, files

from torch_covnorm import CovNormError, records
from torch_covnorm.ecology import Ecology
from torch_covnorm.serve.engine import Engine
from torch_covnorm.serve.errors import RequestError
from torch_covnorm.serve.worker import Worker

ALL = ["roses", "shells", "moths", "coins", "leaves", "north"]


def exported(ecology: Ecology, name: str, folder: Path) -> dict[str, bytes]:
    """Export a domain and return {file name: content}."""
    ran = covnorm("export", name, "--to", "domain", "--out", folder, "--ecology", ecology.folder)
    assert ran.code == 0, ran.err
    place = folder / name
    return {str(f.relative_to(place)): f.read_bytes() for f in place.rglob("*") if f.is_file()}


@pytest.mark.parametrize("name", ALL)
def test_an_uploaded_export_gives_the_same_predictions(
    name: str,
    house: Ecology,
    server: Server,
    writable: SimpleNamespace,
    photo: bytes,
    tmp_path: Path,
):
    put: Server = writable.server
    answer = put.upload("copy", exported(house, name, tmp_path))
    assert answer.status == 201, answer.body
    assert answer.json["domain"] == "copy"
    wanted, found = server.predict(name, photo, 99).json, put.predict("copy", photo, 99).json
    assert [p["label"] for p in found["predictions"]] == [p["label"] for p in wanted["predictions"]]
    for a, b in zip(found["predictions"], wanted["predictions"], strict=True):
        assert a["probability"] == pytest.approx(b["probability"], abs=1e-5)
    assert put.ask("DELETE", "/v1/domains/copy").status == 204
    assert put.predict("copy", photo).status == 404
    assert put.get("/v1/domains/copy").status == 404
    assert put.ask("DELETE", "/v1/domains/copy").status == 404
    assert_tidy(writable.ecology.folder)


def test_the_commands_work_with_an_uploaded_domain(
    house: Ecology, writable: SimpleNamespace, tmp_path: Path, photo: bytes
):
    folder = writable.ecology.folder
    for name, uploaded in (("roses", "copy"), ("north", "joint-copy")):
        files_ = exported(house, name, tmp_path / name)
        assert writable.server.upload(uploaded, files_).status == 201
        alone = Ecology(shutil.copytree(folder, tmp_path / f"with {uploaded}"))
        alone.remove([n for n in alone.domains if n != uploaded])  # the report needs facts
        page = tmp_path / f"{uploaded}.html"
        for words in (["verify"], ["list"], ["show", uploaded], ["report", "--out", page]):
            for json_ in ([], ["--json"]):
                ran = covnorm(*words, "--ecology", alone.folder, *json_)
                assert ran.code == 0, (words, ran.err, ran.out)
        assert uploaded in page.read_text()
        assert covnorm("verify", "--ecology", folder).code == 0
        again = exported(writable.ecology, uploaded, tmp_path / "again")
        assert {k for k in again if k.endswith(".safetensors")} == {
            k for k in files_ if k.endswith(".safetensors")
        }


def test_the_stored_tensors_keep_their_dtype(
    house: Ecology, writable: SimpleNamespace, tmp_path: Path
):
    net = house.network()
    house.load(net, "roses")
    sizes = []
    for dtype in (torch.float32, torch.float16, torch.int8):
        place = net.save_domain("roses", tmp_path / str(dtype), dtype)
        found = {f.name: f.read_bytes() for f in place.iterdir()}
        assert writable.server.upload("copy", found, replace=True).status == 201
        (tensors,) = [data for name, data in found.items() if name.endswith("safetensors")]
        stored = writable.ecology.blobs.read(writable.ecology.entry("copy").blobs["tensors"])
        assert {k: v.dtype for k, v in safetensors.torch.load(stored).items()} == {
            k: v.dtype for k, v in safetensors.torch.load(tensors).items()
        }
        sizes.append(len(stored))
        assert sizes == sorted(sizes, reverse=True)


def test_a_name_that_is_taken_is_409_without_replace(
    house: Ecology, writable: SimpleNamespace, tmp_path: Path, photo: bytes
):
    server, folder = writable.server, writable.ecology.folder
    roses, coins = (exported(house, n, tmp_path) for n in ("roses", "coins"))
    assert server.upload("copy", roses).status == 201
    before, wanted = files(folder), server.predict("copy", photo).best
    answer = server.upload("copy", coins)
    assert (answer.status, answer.reason) == (409, "exists")
    assert "?replace=true" in answer.message
    assert str(folder) not in answer.message
    assert files(folder) == before
    assert server.predict("copy", photo).best == wanted
    assert server.upload("copy", coins, replace=True).status == 201
    assert server.predict("copy", photo).best[0].startswith("coins-")


def test_a_domain_of_another_backbone_is_409(writable: SimpleNamespace, tmp_path: Path):
    import domain_files

    place = domain_files.network().save_domain("flowers", tmp_path / "flowers")
    before = files(writable.ecology.folder)
    answer = writable.server.upload("flowers", {f.name: f.read_bytes() for f in place.iterdir()})
    assert answer.status == 409
    assert "backbone" in answer.message
    assert files(writable.ecology.folder) == before


def test_damaged_and_forged_uploads_are_rejected(
    house: Ecology, writable: SimpleNamespace, tmp_path: Path
):
    """Both what the store would reject and what could be stored but not served."""
    good = exported(house, "coins", tmp_path)
    (tensors,) = [name for name in good if name.endswith(".safetensors")]

    def changed(**preprocessing: object) -> dict[str, bytes]:
        record = json.loads(good["domain.json"])
        record["preprocessing"] |= preprocessing
        record.pop("checksum")
        record["checksum"] = records.checksum(record)
        return {**good, "domain.json": json.dumps(record).encode()}

    flipped = bytearray(good[tensors])
    flipped[-5] ^= 1
    bad = {
        "no tensors": {"domain.json": good["domain.json"]},
        "no record": {tensors: good[tensors]},
        "a flipped bit": {**good, tensors: bytes(flipped)},
        "cut": {**good, tensors: good[tensors][:-9]},
        "a pickle": {**good, tensors: b"\x80\x04cos\nsystem\n."},
        "a side of a million": changed(size=1_000_000),
        "no side": changed(size=None),
        "two means": changed(mean=[0.5, 0.5]),
        "a deviation of nothing": changed(std=[0, 0, 0]),
        "an unknown fit": changed(fit="stretch"),
        "deep": {**good, "domain.json": b"[" * 100_000},
        "another file": {**good, "model.pt": b"x"},
    }
    before = files(writable.ecology.folder)
    for what, found in bad.items():
        answer = writable.server.upload("copy", found)
        assert answer.status in (409, 422), (what, answer.body)
        assert files(writable.ecology.folder) == before, what
    assert writable.server.upload("copy", changed(size=32)).status == 201  # the control


def test_a_body_that_is_not_a_form_is_415_and_an_empty_form_422(writable: SimpleNamespace):
    server = writable.server
    assert server.ask("PUT", "/v1/domains/copy", b"x").status == 415
    assert server.ask("PUT", "/v1/domains/copy").status == 415
    body, headers = form([("other", "domain.json", b"{}")])
    assert server.ask("PUT", "/v1/domains/copy", body, headers).status in (409, 422)


def test_many_deletes_of_one_domain_make_one_204(writable: SimpleNamespace):
    server = writable.server
    for seed in range(3):
        houses.put(writable.ecology, "popular", seed=seed)
        with ThreadPoolExecutor(8) as pool:
            asked = pool.map(lambda _: server.ask("DELETE", "/v1/domains/popular"), range(8))
            found = sorted(answer.status for answer in asked)
        assert found == [204] + [404] * 7


def test_concurrent_uploads_lose_nothing(house: Ecology, writable: SimpleNamespace, tmp_path: Path):
    server, found = writable.server, exported(house, "coins", tmp_path)
    names = [f"copy-{i}" for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: server.upload(name, found), names * 2))
    assert sorted(a.status for a in answers) == [201] * 4 + [409] * 4
    assert set(names) <= set(writable.ecology.domains)


def test_a_store_that_cannot_be_written_is_409(
    house: Ecology, writable: SimpleNamespace, tmp_path: Path, photo: bytes
):
    """The folder of the blobs is missing; the server reports it and continues."""
    server, blobs = writable.server, writable.ecology.folder / "blobs"
    found = exported(house, "coins", tmp_path)
    assert server.predict("stays", photo).status == 200  # it is in memory
    aside = blobs.with_name("aside")
    blobs.rename(aside)
    blobs.write_bytes(b"no folder")
    try:
        assert server.upload("copy", found).status == 409
        assert server.predict("stays", photo).status == 200
    finally:
        blobs.unlink()
        aside.rename(blobs)
    assert server.upload("copy", found).status == 201


@pytest.mark.parametrize(
    ("failure", "status"),
    [(CovNormError("of another backbone"), 409), (KeyError("x"), 500), (None, None)],
)
def test_a_bug_is_500_and_only_a_bad_domain_is_409(failure, status, tmp_path: Path, monkeypatch):
    """The store fails in a made-up way; the worker and the engine report it."""

    def store_upload(*_: object) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr("torch_covnorm.serve.worker.store_upload", store_upload)
    worker = Worker.__new__(Worker)
    worker.ecology = SimpleNamespace(folder=tmp_path)  # type: ignore[assignment]

    async def background(word: str, *args: Any) -> None:
        assert word == "store"
        worker._store(*args)

    handle = SimpleNamespace(process=SimpleNamespace(background=background))
    engine: Any = SimpleNamespace(_idlest=lambda: handle, catalog=SimpleNamespace(entries=dict))
    storing = Engine.store_domain(engine, "coins", str(tmp_path), replace=False)
    if status is None:
        asyncio.run(storing)
        return
    with pytest.raises(RequestError) as error:
        asyncio.run(storing)
    assert error.value.status == status
    assert str(failure) in error.value.message
