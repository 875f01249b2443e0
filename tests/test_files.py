"""Guarantees 4 and 13: a domain's files give it back to the bit, or an error names the file."""

import copy
import errno
import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import torch_covnorm as cn
from torch_covnorm import CovNormError, files

RECORD = "domain.json"
CLASSES = ("daisy", "Löwenzahn", "野バラ", 'a "b"\n/c')
PREPROCESSING = {"size": [32, 32], "mean": [0.5, 0.25, 0.125], "crop": None, "of": "grün"}
KINDS = ["residual", "parallel", "conv", "batchnorm", "lowrank", "covnorm", "absorbed"]


def backbone(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 10),
    ).eval()


def images(n=5):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(9))


def randomize_(domain):
    """Every number of a domain drawn anew, as if trained: outputs show each of them."""
    for name, tensor in domain.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.is_floating_point():
            tensor.normal_(std=0.3)
        else:
            tensor.fill_(7)


def network(kind="residual", **arguments):
    """A network with a trained-looking domain "flowers"."""
    net = cn.MultiDomainNetwork(backbone())
    adapter = "residual" if kind in ("covnorm", "absorbed") else kind
    arguments = {"classes": CLASSES, "preprocessing": PREPROCESSING} | arguments
    torch.manual_seed(1)
    randomize_(net.add_domain("flowers", adapter=adapter, **arguments))
    if kind in ("covnorm", "absorbed"):
        cn.normalize_(net, "flowers", cn.collect(net, "flowers", [images(40)]), variance=0.9)
    if kind == "absorbed":
        cn.absorb_(net, "flowers")
    return net


def reader(make=backbone):
    """Another network on the same backbone, with a domain of its own that must stay as it is."""
    net = cn.MultiDomainNetwork(make())
    torch.manual_seed(2)
    randomize_(net.add_domain("digits", classes=3))
    return net


@pytest.fixture
def folder(tmp_path):
    return network().save_domain("flowers", tmp_path / "flowers")


@torch.no_grad()
def outputs(net, name="flowers"):
    return net(images(), domain=name)


def snapshot(net):
    """Names, every tensor and every answer of a network, to the bit."""
    names = list(net.domains)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    return names, state, {n: outputs(net, n) for n in names}


def assert_same(a, b):
    assert a[0] == b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[k], y[k]) for k in x)


def assert_refused(folder, file, net=None, **arguments):
    """Loading is a CovNormError that names the file, and the network is as it was."""
    net = reader() if net is None else net
    before = snapshot(net)
    with pytest.raises(CovNormError) as error:
        net.load_domain(folder, **arguments)
    assert file in str(error.value)
    assert_same(before, snapshot(net))
    return str(error.value)


def tensor_file(folder):
    (file,) = folder.glob("*.safetensors")
    return file


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def forge(folder, record=None, tensors=None, blob=None):
    """An attacker's edit with every checksum made to fit: `record` changes the JSON, `tensors` the
    tensors, `blob` is the tensor file's new bytes."""
    file = tensor_file(folder)
    r = json.loads((folder / RECORD).read_text())
    if tensors is not None:
        loaded = safetensors.torch.load(file.read_bytes())
        tensors(loaded)
        blob = safetensors.torch.save(loaded)
    if blob is not None:
        file.write_bytes(blob)
        r["tensors"]["sha256"] = hashlib.sha256(blob).hexdigest()
    if record is not None:
        record(r)
    r.pop("checksum")
    r["checksum"] = files._checksum(r)
    (folder / RECORD).write_text(json.dumps(r))


# ── round trips ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_domain_comes_back_from_its_files_to_the_bit(kind, tmp_path):
    net = network(kind)
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
    """Never a folder that save accepts and load calls damaged."""
    net = network(preprocessing=value)
    try:
        net.save_domain("flowers", tmp_path / "a")
    except CovNormError:
        assert not (tmp_path / "a").exists()
    else:
        assert reader().load_domain(tmp_path / "a").preprocessing == json.loads(json.dumps(value))


def test_a_class_named_by_a_folder_that_is_not_utf8_is_given_back_or_refused(tmp_path):
    name = os.fsdecode(b"caf\xe9")  # what listing an ImageFolder from an old disk gives
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


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bfloat16, "float16"])
def test_any_other_storage_type_is_refused(dtype, tmp_path):
    with pytest.raises(CovNormError, match="float32 or float16"):
        network().save_domain("flowers", tmp_path / "a", dtype=dtype)
    assert not (tmp_path / "a").exists()


# ── same domain, same bytes ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_domain_gives_the_same_bytes_in_all_files(kind, dtype, tmp_path):
    net = network(kind)
    expected = contents(net.save_domain("flowers", tmp_path / "a", dtype))
    assert len(expected) == 2
    assert contents(net.save_domain("flowers", tmp_path / "a", dtype)) == expected
    assert contents(net.save_domain("flowers", tmp_path / "b", dtype)) == expected
    assert contents(network(kind).save_domain("flowers", tmp_path / "c", dtype)) == expected
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


def test_a_read_only_folder_is_an_error_that_names_it(folder):
    before = contents(folder)
    folder.chmod(0o555)
    try:
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(CovNormError, match=str(folder)):
            network("lowrank").save_domain("flowers", folder)
    finally:
        folder.chmod(0o755)
    assert contents(folder) == before


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
    """Negative control: safetensors does not notice, so it is our check that does."""
    file = tensor_file(folder)
    file.write_bytes(flipped(file.read_bytes(), 8 * file.stat().st_size - 12))
    assert "checksum" in assert_refused(folder, file.name)

    def unchecked(file, _):
        return safetensors.torch.load(file.read_bytes())

    monkeypatch.setattr(files, "_read_tensors", unchecked)
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


# ── attacks: every checksum fits ────────────────────────────────────────────────────────────────


def test_a_record_that_is_sealed_again_unchanged_loads(folder):
    """Control of the attacks below: what refuses them is not the checksum."""
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
    "rank zero": map_of("lowrank", 0),
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
    """The bytes of a safetensors file with a header of one's own."""
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
