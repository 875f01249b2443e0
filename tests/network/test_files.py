"""Guarantees 4 and 13: a domain comes back from its files to the bit."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from domain_files import (
    CLASSES,
    KINDS,
    PREPROCESSING,
    RECORD,
    assert_refused,
    contents,
    forge,
    network,
    outputs,
    randomize_,
    reader,
    snapshot,
    tensor_file,
)
from torch import nn

import torch_covnorm as cn
from torch_covnorm import CovNormError
from torch_covnorm.network import files

# ── round trips ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("norms", ["shared", "sites", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_domain_comes_back_from_its_files_to_the_bit(kind, norms, tmp_path):
    net = network(kind, norms=None if kind == "batchnorm" else norms)
    assert net.save_domain("flowers", tmp_path / "a") == tmp_path / "a"
    other = reader()
    loaded = other.load_domain(tmp_path / "a")
    saved = net.domain("flowers")
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(outputs(other), outputs(net))
    assert other.num_parameters("flowers") == net.num_parameters("flowers")
    trains = [n for n, p in saved.named_parameters() if p.requires_grad]
    assert [n for n, p in loaded.named_parameters() if p.requires_grad] == trains


@pytest.mark.parametrize("kind", ["residual", "parallel", "lowrank"])
def test_a_network_of_linear_layers_comes_back_too(kind, tmp_path):
    def mlp():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
        )

    net, other = cn.MultiDomainNetwork(mlp().eval()), cn.MultiDomainNetwork(mlp().eval())
    randomize_(net.add_domain("flowers", classes=4, adapter=kind))
    other.load_domain(net.save_domain("flowers", tmp_path))
    x = torch.randn(7, 9)
    assert torch.equal(other(x, domain="flowers"), net(x, domain="flowers"))


def test_an_own_module_travels_with_the_domain_and_is_asked_for(tmp_path):
    net = network(classes=None, own=nn.Linear(6, 2))
    folder = net.save_domain("flowers", tmp_path / "a")
    other = reader()
    other.load_domain(folder, own=nn.Linear(6, 2))
    assert torch.equal(outputs(other), outputs(net))
    assert "own" in assert_refused(folder, RECORD)
    wrong = nn.Linear(6, 3)
    weight = wrong.weight.clone()
    assert_refused(folder, tensor_file(folder).name, own=wrong)
    assert torch.equal(wrong.weight, weight)
    plain = network().save_domain("flowers", tmp_path / "b")
    assert_refused(plain, RECORD, own=nn.Linear(6, 2))


def test_class_names_and_preprocessing_survive(folder):
    loaded = reader().load_domain(folder)
    assert loaded.classes == CLASSES
    assert loaded.preprocessing == PREPROCESSING
    assert loaded.name == "flowers"


def circular():
    value = []
    value.append(value)
    return value


ODD_VALUES = {
    "number": 0,
    "text": "text",
    "empty": [],
    "nested": {"deep": {"er": [1, [2, [3]]]}},
    "numbers": [1e-05, 1e300, 0.1, -0.0, 10**30],
    "tuple": (1, 2),
    "numbers as keys": {2: "two", 10: "ten"},
    "NaN": {"mean": float("nan")},
    "Inf": {"scale": float("inf")},
    "set": {"sizes": {32, 64}},
    "half a surrogate pair": "\ud800",
    "circular": circular(),
}


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_any_preprocessing_is_given_back_or_refused_at_once(value, tmp_path):
    """Saving never accepts what loading would call damaged."""
    net = network(preprocessing=value)
    try:
        net.save_domain("flowers", tmp_path / "a")
    except CovNormError:
        assert not (tmp_path / "a").exists()
    else:
        assert reader().load_domain(tmp_path / "a").preprocessing == json.loads(json.dumps(value))


def test_a_class_named_by_a_folder_that_is_not_utf8_is_given_back_or_refused(tmp_path):
    name = os.fsdecode(b"caf\xe9")  # as in the listing of an ImageFolder from an old disk
    net = network(classes=[name, "tea"])
    try:
        net.save_domain("flowers", tmp_path / "a")
    except CovNormError:
        assert not (tmp_path / "a").exists()
    else:
        assert reader().load_domain(tmp_path / "a").classes == (name, "tea")


def test_a_domain_loads_under_another_name(folder):
    net = reader()
    assert net.load_domain(folder, name="roses").name == "roses"
    net.load_domain(folder)
    assert list(net.domains) == ["digits", "roses", "flowers"]
    assert torch.equal(outputs(net, "roses"), outputs(net, "flowers"))


def test_a_name_that_is_taken_is_refused(folder):
    net = reader()
    net.load_domain(folder)
    assert_refused(folder, "flowers", net)
    assert_refused(folder, "digits", net, name="digits")


@pytest.mark.parametrize("name", ["", "../up", "a/b", "Flowers", ".hidden", "x" * 65, "a\n"])
def test_a_name_that_is_unsafe_is_refused_whoever_gives_it(name, folder):
    assert_refused(folder, "name", name=name)
    forge(folder, lambda r: r.update(name=name))
    assert_refused(folder, RECORD)


def test_loading_leaves_the_other_domains_and_the_backbone_alone(folder):
    net = reader()
    _, state, answers = snapshot(net)
    net.load_domain(folder)
    after = snapshot(net)
    assert torch.equal(after[2]["digits"], answers["digits"])
    assert all(torch.equal(after[1][k], state[k]) for k in state)


# ── float16 ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["residual", "covnorm", "absorbed"])
def test_float16_files_are_smaller_and_off_by_float16_rounding_only(kind, tmp_path):
    net = network(kind)
    full = net.save_domain("flowers", tmp_path / "full")
    half = net.save_domain("flowers", tmp_path / "half", dtype=torch.float16)
    assert tensor_file(half).stat().st_size < tensor_file(full).stat().st_size
    other = reader()
    loaded = other.load_domain(half).state_dict()
    for name, tensor in net.domain("flowers").state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        # 11 bits of mantissa, and steps of 2^-24 below the smallest normal number.
        assert ((loaded[name] - tensor).abs() <= tensor.abs() * 2**-11 + 2**-25).all(), name
    torch.testing.assert_close(outputs(other), outputs(net), rtol=0.02, atol=0.02)
    assert not torch.equal(outputs(other), outputs(net)), "control: the rounding shows"


def test_a_tensor_that_would_overflow_in_float16_stays_float32(tmp_path):
    net = network()
    with torch.no_grad():
        net.domain("flowers").head.weight[0, 0] = 1e6
    half = net.save_domain("flowers", tmp_path, dtype=torch.float16)
    stored = safetensors.torch.load_file(tensor_file(half))
    kept = {name for name, t in stored.items() if t.dtype == torch.float32}
    assert kept == {"head.weight"}
    weight = reader().load_domain(half).head.weight
    assert torch.equal(weight, net.domain("flowers").head.weight)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64, torch.bfloat16, "float16"])
def test_any_other_storage_type_is_refused(dtype, tmp_path):
    with pytest.raises(CovNormError, match="float32, float16 or int8"):
        network().save_domain("flowers", tmp_path / "a", dtype=dtype)
    assert not (tmp_path / "a").exists()


# ── same domain, same bytes ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norms", ["shared", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_domain_gives_the_same_bytes_in_all_files(kind, norms, dtype, tmp_path):
    norms = None if kind == "batchnorm" else norms
    net = network(kind, norms=norms)
    expected = contents(net.save_domain("flowers", tmp_path / "a", dtype))
    assert len(expected) == 2
    assert contents(net.save_domain("flowers", tmp_path / "a", dtype)) == expected
    assert contents(net.save_domain("flowers", tmp_path / "b", dtype)) == expected
    again = network(kind, norms=norms)
    assert contents(again.save_domain("flowers", tmp_path / "c", dtype)) == expected
    other = reader()
    other.load_domain(tmp_path / "a")
    assert contents(other.save_domain("flowers", tmp_path / "d", dtype)) == expected


def test_a_domain_that_differs_in_one_bit_gives_other_bytes(tmp_path):
    net = network()
    before = contents(net.save_domain("flowers", tmp_path / "a"))
    with torch.no_grad():
        net.domain("flowers").head.bias.view(torch.int32)[0] ^= 1
    assert contents(net.save_domain("flowers", tmp_path / "b")) != before


# ── writing ─────────────────────────────────────────────────────────────────────────────────────


def test_saving_over_a_folder_leaves_the_new_domain_and_no_rest(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    network("covnorm").save_domain("flowers", tmp_path)
    net = network("lowrank", classes=["a", "b"])
    net.save_domain("flowers", tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {RECORD, tensor_file(tmp_path).name, "notes.txt"}
    assert (tmp_path / "notes.txt").read_text() == "mine"
    other = reader()
    other.load_domain(tmp_path)
    assert torch.equal(outputs(other), outputs(net))


def test_folders_are_made_and_files_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        folder = network().save_domain("flowers", str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o640}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["head.weight", "adapters.3.A.A", "norms.1.running_var"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_domain_with_nan_is_not_saved_and_the_old_files_stay(bad, part, dtype, folder):
    before = contents(folder)
    net = network()
    with torch.no_grad():
        net.domain("flowers").state_dict()[part].view(-1)[-1] = bad
    with pytest.raises(CovNormError, match=part):
        net.save_domain("flowers", folder, dtype)
    assert contents(folder) == before
    with pytest.raises(CovNormError, match=part):
        net.save_domain("flowers", folder.parent / "new", dtype)
    assert not (folder.parent / "new").exists()


def test_an_unknown_domain_is_not_saved(tmp_path):
    with pytest.raises(CovNormError, match="flower"):
        network().save_domain("flower", tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_disk_that_fails_at_any_step_leaves_the_old_domain_or_the_new(
    failing, folder, monkeypatch
):
    old, new = outputs(network()), network("lowrank")
    calls = []

    def fsync(_):
        calls.append(1)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises((CovNormError, OSError)):
        new.save_domain("flowers", folder)
    assert len(calls) == failing
    net = reader()
    net.load_domain(folder)
    answers = outputs(net)
    assert torch.equal(answers, old) or torch.equal(answers, outputs(new))
    assert not [f.name for f in folder.iterdir() if f.name.startswith(".")], "no half-written rest"
    new.save_domain("flowers", folder)
    assert len(contents(folder)) == 2


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CovNormError, match=f"{tmp_path}.*No space left"):
        network().save_domain("flowers", tmp_path)


@pytest.mark.parametrize("below", [".", "deeper"])
def test_a_file_in_the_place_of_the_folder_is_an_error_that_names_it(below, tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(CovNormError, match="taken"):
        network().save_domain("flowers", tmp_path / "taken" / below)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_read_only_folder_is_an_error_that_names_it():
    """Root may write everywhere, so as root this runs as `nobody` for a moment."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    net, user = network("lowrank"), os.geteuid()
    folder = network().save_domain("flowers", base / "flowers")
    before = contents(folder)
    folder.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)
        assert not os.access(folder, os.W_OK, effective_ids=True)
        with pytest.raises(CovNormError, match=str(folder)):
            net.save_domain("flowers", folder)
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
    assert contents(folder) == before
    shutil.rmtree(base)


# ── statistics of norms ──────────────────────────────────────────────────────────────────────


def with_norms(changed=False):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    backbone(torch.randn(8, 3, 6, 6))  # its running statistics are not the initial ones
    net = cn.MultiDomainNetwork(backbone.eval())
    domain = net.add_domain("a", 2, norms="own")
    if changed:
        domain.norms["1"].running_var.mul_(1.5)
    return net.eval()


@pytest.mark.parametrize("changed", [False, True])
def test_statistics_that_are_the_backbones_are_not_stored_and_come_back_to_the_bit(
    tmp_path, changed
):
    net, x = with_norms(changed), torch.randn(3, 3, 6, 6)
    record, tensors = files.packed(net, net.domain("a"), torch.float16)
    assert record["statistics"] == ("own" if changed else "backbone")
    assert ("norms.1.running_var" in tensors) == changed
    net.save_domain("a", tmp_path / "a")
    before = net(x, domain="a")
    again = with_norms()
    again.remove_domain("a")
    again.load_domain(tmp_path / "a")
    assert torch.equal(again.eval()(x, domain="a"), before)


def test_statistics_that_are_missing_without_a_word_are_an_error():
    net = with_norms()
    record, tensors = files.packed(net, net.domain("a"), torch.float32)
    here = Path("here")
    with pytest.raises(cn.CovNormError, match="running_mean"):
        files.unpacked(net, record | {"statistics": "own"}, tensors, "b", None, here, here)
