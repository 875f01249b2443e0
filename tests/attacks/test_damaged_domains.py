"""Guarantee 13: a damaged file or another backbone is an error that names the file."""

import random
import shutil

import pytest
import safetensors.torch
import torch
from domain_files import RECORD, assert_refused, backbone, network, outputs, reader, tensor_file
from torch import nn

import torch_covnorm as cn
from torch_covnorm import records

# ── damage ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("which", [RECORD, "tensors"])
def test_a_file_cut_anywhere_is_refused_by_name(which, folder):
    file = tensor_file(folder) if which == "tensors" else folder / which
    blob = file.read_bytes()
    net = reader()
    for length in {0, 1, 7, 8, 9, len(blob) - 1, *range(0, len(blob), len(blob) // 40)}:
        file.write_bytes(blob[:length])
        assert_refused(folder, file.name, net)
    file.write_bytes(blob)
    net.load_domain(folder)


@pytest.mark.parametrize("which", [RECORD, "tensors"])
@pytest.mark.slow
def test_one_flipped_bit_anywhere_is_refused_by_name(which, folder):
    file = tensor_file(folder) if which == "tensors" else folder / which
    blob = file.read_bytes()
    net = reader()
    for bit in random.Random(0).sample(range(8 * len(blob)), 250):
        file.write_bytes(flipped(blob, bit))
        assert_refused(folder, file.name, net)
    file.write_bytes(blob)
    net.load_domain(folder)


def flipped(blob, bit):
    damaged = bytearray(blob)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_without_the_checksum_a_flipped_payload_bit_would_load_silently(folder, monkeypatch):
    """Negative control: safetensors does not notice, only our check does."""
    file = tensor_file(folder)
    file.write_bytes(flipped(file.read_bytes(), 8 * file.stat().st_size - 12))
    assert "checksum" in assert_refused(folder, file.name)

    def unchecked(record_file, record):
        return safetensors.torch.load(records.tensor_file(record_file, record).read_bytes())

    monkeypatch.setattr(records, "read_tensors", unchecked)
    net = reader()
    loaded = net.load_domain(folder).state_dict()
    saved = network().domain("flowers").state_dict()
    assert [k for k in saved if not torch.equal(saved[k], loaded[k])], "a wrong domain, no error"


def test_bytes_behind_the_end_are_refused(folder):
    for file in (tensor_file(folder), folder / RECORD):
        blob = file.read_bytes()
        file.write_bytes(blob + b"\0")
        assert_refused(folder, file.name)
        file.write_bytes(blob)


def test_a_missing_file_is_refused_by_name(folder):
    tensors = tensor_file(folder).name
    for name in (RECORD, tensors):
        (folder / name).rename(folder / "away")
        assert_refused(folder, name)
        (folder / "away").rename(folder / name)


def test_an_empty_folder_no_folder_and_a_file_are_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("{}")
    for name in (".", "missing", "file"):
        assert_refused(tmp_path / name, RECORD)


def test_the_tensors_of_another_domain_are_refused(folder, tmp_path):
    other = network("lowrank").save_domain("flowers", tmp_path / "other")
    shutil.copy(tensor_file(other), tensor_file(folder))
    assert_refused(folder, tensor_file(folder).name)


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", "{}", '"domain"', "\xff", "[" * 100_000, "9" * 5000, "NaN"],
    ids=lambda t: repr(t[:8]),
)
def test_json_that_is_no_record_is_refused_by_name(text, folder):
    (folder / RECORD).write_bytes(text.encode("latin-1"))
    assert_refused(folder, RECORD)


# ── another backbone ────────────────────────────────────────────────────────────────────────────


def one_bit_off():
    net = backbone()
    with torch.no_grad():
        net[3].weight.view(torch.int32)[-1, -1, -1, -1] ^= 1
    return net


def other_statistics():
    net = backbone()
    net[1].running_mean += 1
    return net


@pytest.mark.parametrize("make", [lambda: backbone(seed=1), one_bit_off, other_statistics])
def test_a_domain_of_another_backbone_is_refused(make, folder):
    assert "backbone" in assert_refused(folder, RECORD, reader(make))


def test_a_backbone_of_another_shape_or_with_other_sites_is_refused(folder):
    def narrower():
        net = backbone()
        net[3], net[7] = nn.Conv2d(4, 5, 3, stride=2), nn.Linear(5, 10)
        return net

    assert_refused(folder, RECORD, reader(narrower))
    fewer = cn.MultiDomainNetwork(backbone(), sites=lambda name, _: name == "3")
    assert_refused(folder, RECORD, fewer)
    headless = cn.MultiDomainNetwork(backbone(), sites=lambda name, _: name != "7", head=None)
    assert_refused(folder, RECORD, headless)


def test_the_head_that_every_domain_replaces_may_differ(folder):
    def other_head():
        net = backbone()
        net[7] = nn.Linear(6, 2)
        return net

    net = reader(other_head)
    net.load_domain(folder)
    assert torch.equal(outputs(net), outputs(network()))
