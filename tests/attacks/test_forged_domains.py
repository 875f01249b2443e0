"""Guarantee 13: hostile files with valid checksums are refused, and the network stays the same."""

import copy
import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from domain_files import (
    RECORD,
    assert_refused,
    backbone,
    contents,
    forge,
    network,
    outputs,
    randomize_,
    reader,
    tensor_file,
)

import torch_covnorm as cn
from torch_covnorm.network import files

# ── attacks: all checksums are valid ───────────────────────────────────────────────────────────


def test_a_record_that_is_sealed_again_unchanged_loads(folder):
    """Control of the attacks below: it is not the checksum that refuses them."""
    forge(folder, record=dict.copy, tensors=dict.copy)
    net = reader()
    net.load_domain(folder)
    assert torch.equal(outputs(net), outputs(network()))


def adapter(**changes):
    return lambda r: r["sites"]["3"]["adapter"].update(changes)


def map_of(form, *ranks):
    return lambda r: r["sites"]["3"]["adapter"]["map"].update(form=form, ranks=list(ranks))


def tensors_named(name):
    return lambda r: r["tensors"].update(file=name)


FORGED_RECORDS = {
    "unknown version": lambda r: r.update(version=2),
    "old version": lambda r: r.update(version=0),
    "no version": lambda r: r.pop("version"),
    "another format": lambda r: r.update(format="something else"),
    "another fingerprint": lambda r: r["backbone"].update(fingerprint="0" * 64),
    "fingerprint of another type": lambda r: r["backbone"].update(fingerprint=7),
    "no backbone": lambda r: r.pop("backbone"),
    "no name": lambda r: r.pop("name"),
    "no sites": lambda r: r.pop("sites"),
    "sites of another type": lambda r: r.update(sites=["0", "3"]),
    "one site fewer": lambda r: r["sites"].pop("3"),
    "one site more": lambda r: r["sites"].update({"9": r["sites"]["3"]}),
    "another site's shape": lambda r: r["sites"]["3"].update(shape=[6, 3]),
    "tensor file in a folder": tensors_named("sub/tensors.safetensors"),
    "tensor file above": tensors_named("../tensors.safetensors"),
    "tensor file by absolute path": tensors_named("/etc/tensors.safetensors"),
    "tensor file of another kind": tensors_named("tensors.pt"),
    "tensor file of no name": tensors_named(""),
    "tensor file of another type": tensors_named(["a.safetensors"]),
    "no tensor file": lambda r: r.pop("tensors"),
    "unknown adapter": adapter(kind="evil"),
    "adapter of another type": adapter(kind=["residual"]),
    "map of another type": adapter(map="full"),
    "unknown form": map_of("evil"),
    "no rank": map_of("lowrank"),
    "one rank too many": map_of("lowrank", 2, 2),
    "negative rank": map_of("lowrank", -1),
    "rank above d": map_of("lowrank", 7),
    "rank bomb": map_of("lowrank", 10**9),
    "rank bombs": map_of("covnorm", 10**9, 10**9),
    "rank of 300 digits": map_of("lowrank", 1e300),
    "rank of another type": map_of("lowrank", "many"),
    "no classes": lambda r: r.update(classes=None),
    "no class": lambda r: r.update(classes=[]),
    "a class twice": lambda r: r.update(classes=["a", "a", "b", "c"]),
    "class bomb": lambda r: r.update(classes=2_000_000),  # 10**9 would take the memory
    "classes of another type": lambda r: r.update(classes="abcd"),
}


@pytest.mark.parametrize("edit", FORGED_RECORDS.values(), ids=FORGED_RECORDS)
def test_a_forged_record_is_refused_by_name(edit, folder):
    forge(folder, edit)
    assert_refused(folder, RECORD)


def test_a_rank_of_zero_that_the_tensors_do_not_have_is_refused(folder):
    forge(folder, map_of("lowrank", 0))
    assert_refused(folder, ".safetensors")


@pytest.mark.parametrize(
    ("edit", "without"),
    [(adapter(map=None), ".3.A."), (adapter(kind="batchnorm"), ".3.B1.")],
    ids=["no map", "a map too many"],
)
def test_an_adapter_whose_map_does_not_fit_its_kind_is_refused(edit, without, folder):
    def fit(tensors):
        for name in [n for n in tensors if without in n]:
            del tensors[name]

    forge(folder, edit, fit)
    assert_refused(folder, RECORD)


def raw(header, payload=b""):
    """The bytes of a safetensors file with this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def f32(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def changed(change, name="head.weight"):
    return lambda t: t.update({name: change(t[name])})


FORGED_TENSORS = {
    "a tensor more": lambda t: t.update(extra=torch.zeros(2)),
    "a tensor fewer": lambda t: t.pop("head.bias"),
    "a tensor renamed": lambda t: t.update({"head.Weight": t.pop("head.weight")}),
    "a row fewer": changed(lambda w: w[1:].contiguous()),
    "transposed": changed(lambda w: w.T.contiguous()),
    "flat": changed(lambda w: w.flatten()),
    "one number for all": changed(lambda w: w[:1, :1].clone()),
    "no number": changed(lambda w: w[:0].clone()),
    "one axis more": changed(lambda w: w[None].clone()),
    "a vector for a number": changed(lambda n: n[None].clone(), "norms.1.num_batches_tracked"),
    "float64": changed(torch.Tensor.double),
    "bfloat16": changed(torch.Tensor.bfloat16),
    "whole numbers": changed(torch.Tensor.long),
    "a float for a count": changed(torch.Tensor.float, "norms.1.num_batches_tracked"),
    "NaN": changed(lambda w: w.index_fill(0, torch.tensor([1]), float("nan"))),
    "Inf": changed(lambda w: w.index_fill(0, torch.tensor([1]), -float("inf"))),
    "NaN in half": changed(lambda w: w.half() * float("nan")),
}

FORGED_BYTES = {
    "no bytes": b"",
    "noise": random.Random(0).randbytes(3000),
    "header of 4 exabytes": (2**62).to_bytes(8, "little") + b"{}",
    "empty header": raw({}),
    "tensor of 16 terabytes": raw({"head.weight": f32([2**42], 0, 2**44)}, b"\0" * 8),
    "offsets outside": raw({"head.weight": f32([2], 8, 16)}, b"\0" * 8),
    "overlapping": raw({"a": f32([2], 0, 8), "b": f32([2], 0, 8)}, b"\0" * 8),
    "absurd empty shape": raw({"head.weight": f32([2**63, 0], 0, 0)}),
    "unknown type": raw({"head.weight": f32([2], 0, 8, "PICKLE")}, b"\0" * 8),
    "type torch lacks": raw({"head.weight": f32([2], 0, 1, "F4")}, b"\0"),
}


@pytest.mark.parametrize("edit", FORGED_TENSORS.values(), ids=FORGED_TENSORS)
def test_forged_tensors_are_refused_by_name(edit, folder):
    forge(folder, tensors=edit)
    assert_refused(folder, tensor_file(folder).name)


@pytest.mark.parametrize("blob", FORGED_BYTES.values(), ids=FORGED_BYTES)
def test_bytes_that_are_no_honest_safetensors_are_refused_by_name(blob, folder):
    forge(folder, blob=blob)
    assert_refused(folder, tensor_file(folder).name)


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("written_by", ["pickle", "torch"])
@pytest.mark.parametrize("in_place_of", ["tensors", RECORD])
def test_a_pickle_is_refused_by_name_and_never_run(written_by, in_place_of, folder, tmp_path):
    marker = tmp_path / "was-run"
    if written_by == "pickle":
        blob = pickle.dumps(Evil(marker))
    else:
        torch.save({"head.weight": Evil(marker)}, tmp_path / "evil.pt")
        blob = (tmp_path / "evil.pt").read_bytes()
    if in_place_of == "tensors":
        forge(folder, blob=blob)
        assert_refused(folder, tensor_file(folder).name)
    else:
        (folder / RECORD).write_bytes(blob)
        assert_refused(folder, RECORD)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists(), "control: unpickled, it would have run"


def test_a_refused_domain_can_be_loaded_once_its_files_are_whole_again(folder):
    whole, net = contents(folder), reader()
    forge(folder, tensors=changed(lambda w: w[1:].contiguous()))
    assert_refused(folder, tensor_file(folder).name, net)
    for name, blob in whole.items():
        (folder / name).write_bytes(blob)
    net.load_domain(folder)
    assert torch.equal(outputs(net), outputs(network()))


def test_the_fingerprint_is_of_the_values_and_not_of_the_object():
    a, b = cn.MultiDomainNetwork(backbone()), cn.MultiDomainNetwork(copy.deepcopy(backbone()))
    assert a.fingerprint == b.fingerprint
    assert a.fingerprint != cn.MultiDomainNetwork(backbone(seed=1)).fingerprint
    before = a.fingerprint
    randomize_(a.add_domain("flowers", classes=2))
    assert files.fingerprint(a.backbone, a.head_name) == before
