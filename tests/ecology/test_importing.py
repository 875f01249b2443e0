"""`import`: a domain folder becomes a domain of the store, after everything was checked."""

from __future__ import annotations

import json
import shutil

import pytest
import small_ecology as small
import torch

import torch_covnorm as cn
from torch_covnorm import records
from torch_covnorm.ecology import Ecology, verify
from torch_covnorm.ecology.importing import import_domain
from torch_covnorm.engines.export import export

INPUTS = {"size": 8, "mean": [0.5] * 3, "std": [0.25] * 3, "fit": "squash"}


@pytest.fixture
def ecology(tmp_path):
    return Ecology.create(tmp_path / "house", small.backbone())


def network(*names, seed=0):
    net = small.network(*names, seed=seed)
    for name in names:
        net.domain(name).preprocessing = dict(INPUTS)
    return net


def shared(*names, seed=0):
    net = network(*names, seed=seed)
    torch.manual_seed(seed)
    x = torch.randn(8, 3, 8, 8)
    cn.join_(net, list(names), {name: cn.collect(net, name, [x]) for name in names}, 0.9)
    return net


def logits(net, name):
    torch.manual_seed(7)
    with torch.inference_mode():
        return net.eval()(torch.randn(3, 3, 8, 8), domain=name)


def stored_logits(ecology, name):
    net = ecology.network(small.backbone())
    ecology.load(net, name)
    return logits(net, name)


def imported(ecology, folder, *args, **kwargs):
    return import_domain(ecology, folder, *args, backbone=small.backbone(), **kwargs)


@pytest.fixture
def flowers(tmp_path):
    """A network, and the folder that `export` writes of its domain."""
    net = network("flowers")
    export(net, "flowers", tmp_path / "out", "domain")
    return net, tmp_path / "out" / "flowers"


def test_an_exported_domain_is_imported_under_its_name_or_another_to_the_bit(ecology, flowers):
    net, folder = flowers
    assert imported(ecology, folder) == "flowers"
    assert imported(ecology, folder, "petals", source={"imported": str(folder)}) == "petals"
    for name in ("flowers", "petals"):
        assert torch.equal(stored_logits(ecology, name), logits(net, "flowers"))
    details = ecology.details("petals")
    tensors = json.loads((folder / "domain.json").read_bytes())["tensors"]["sha256"]
    assert details["source"] | {"imported": str(folder), "tensors": tensors} == details["source"]
    assert details["method"] == ecology.entry("petals").method == "import"
    assert [event["what"] for event in details["history"]] == ["import"]
    assert ecology.entry("petals").accuracy is None, "nothing was measured here"
    assert ecology.record("petals")["classes"] == list(net.domain("flowers").classes)
    assert verify(ecology.folder) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_the_precision_of_the_files_stays(ecology, tmp_path, dtype):
    folder = network("flowers").save_domain("flowers", tmp_path / "out", dtype)
    (folder / "other.safetensors").write_bytes(b"not of this domain")
    imported(ecology, folder)
    stored = ecology.blobs.read_tensors(ecology.entry("flowers").blobs["tensors"])
    assert (torch.int8 if dtype == torch.int8 else dtype) in {t.dtype for t in stored.values()}
    assert ecology.details("flowers")["results"]["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.slow
def test_a_name_that_is_taken_needs_replace_and_the_old_one_can_come_back(ecology, flowers):
    small.added(ecology, "flowers", "ra")
    old, before = small.answers(ecology, "flowers"), small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match=r"'flowers' already exists.*--replace"):
        imported(ecology, flowers[1])
    assert small.files(ecology.folder) == before
    imported(ecology, flowers[1], replace=True)
    assert torch.equal(stored_logits(ecology, "flowers"), logits(flowers[0], "flowers"))
    assert [e["what"] for e in ecology.details("flowers")["history"]] == ["add", "import"]
    assert [row["what"] for row in ecology.history("flowers")] == ["import", "add"]
    ecology.rollback(["flowers"])
    assert small.answers(ecology, "flowers") == old


# ── joint mode ────────────────────────────────────────────────────────────────────────────────


def test_a_joint_domain_brings_its_basis_and_the_second_shares_it(ecology, tmp_path):
    net = shared("a", "b")
    for name in ("a", "b"):
        export(net, name, tmp_path, "domain")
        imported(ecology, tmp_path / name)
        assert torch.equal(stored_logits(ecology, name), logits(net, name))
    assert list(ecology.bases) == ["joint"]
    assert verify(ecology.folder) == []


def test_a_basis_that_is_in_the_store_already_need_not_be_in_the_folder(ecology, tmp_path):
    net = shared("a", "b")
    for name in ("a", "b"):
        export(net, name, tmp_path, "domain")
    shutil.rmtree(tmp_path / "b" / "basis")
    with pytest.raises(
        cn.CovNormError, match=r"domain.json: shares the basis 'joint'.*covnorm exp"
    ):
        imported(ecology, tmp_path / "b")
    assert ecology.domains == {}
    imported(ecology, tmp_path / "a")
    imported(ecology, tmp_path / "b")
    assert torch.equal(stored_logits(ecology, "b"), logits(net, "b"))


def test_another_basis_of_the_same_name_is_refused_until_it_gets_another(ecology, tmp_path):
    for seed, name in ((0, "a"), (1, "c")):
        net = shared(name, "b", seed=seed)
        export(net, name, tmp_path, "domain")
    imported(ecology, tmp_path / "a")
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match=r"basis 'joint' is shared by a.*--basis"):
        imported(ecology, tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "basis")
    with pytest.raises(cn.CovNormError, match=r"neither in .*basis nor in this ecology"):
        imported(ecology, tmp_path / "bare")
    assert small.files(ecology.folder) == before
    imported(ecology, tmp_path / "c", basis="joint-c")
    assert sorted(ecology.bases) == ["joint", "joint-c"]
    assert torch.equal(stored_logits(ecology, "c"), logits(net, "c"))
    assert verify(ecology.folder) == []


# ── refused ───────────────────────────────────────────────────────────────────────────────────


def sealed_again(folder, change):
    """Change the record of a domain so that its checksum fits."""
    file = folder / "domain.json"
    record = small.content(json.loads(file.read_bytes()))
    change(record)
    file.write_bytes(records.sealed("torch-covnorm domain", record))


BAD = {
    "no record": lambda f: (f / "domain.json").unlink(),
    "a damaged record": lambda f: (f / "domain.json").write_text("{}"),
    "no tensors": lambda f: next(f.glob("*.safetensors")).unlink(),
    "another backbone": lambda f: sealed_again(
        f, lambda r: r["backbone"].update(fingerprint="0" * 64)
    ),
    "no preprocessing": lambda f: sealed_again(f, lambda r: r.update(preprocessing=None)),
    "a basis that is a word": lambda f: sealed_again(f, lambda r: r.update(basis="joint")),
    "a basis without a name": lambda f: sealed_again(f, lambda r: r.update(basis={})),
    "a name that is none": lambda f: sealed_again(f, lambda r: r.update(name="../x")),
    "tensors elsewhere": lambda f: sealed_again(
        f, lambda r: r["tensors"].update(file="../x.safetensors")
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_folder_with_a_fault_is_refused_by_name_and_the_store_stays(ecology, flowers, what):
    folder = flowers[1]
    sealed_again(folder, dict.copy)
    BAD[what](folder)
    small.put(ecology, "other")
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError):
        imported(ecology, folder)
    assert small.files(ecology.folder) == before


def test_control_a_folder_that_is_sealed_again_is_imported(ecology, flowers):
    sealed_again(flowers[1], dict.copy)
    imported(ecology, flowers[1])


def test_one_flipped_bit_of_the_tensors_is_refused(ecology, flowers):
    (file,) = flowers[1].glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(cn.CovNormError, match=rf"{file.name}.*checksum"):
        imported(ecology, flowers[1])


def test_the_folder_above_is_an_error_with_the_remedy(ecology, flowers):
    with pytest.raises(cn.CovNormError, match=r"out: has no domain.json.*covnorm export"):
        imported(ecology, flowers[1].parent)
