"""Exported domains give the network's logits without this package installed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import zoo
from torch import nn

import torch_covnorm as cn
from torch_covnorm import CovNormError, records
from torch_covnorm.backbones import EfficientNetLite0
from torch_covnorm.engines.export import ENDINGS, FORMAT, Exported, export

CLASSES = ("daisy", "Löwenzahn", "野バラ", 'a "b"\n/c')
PREPROCESSING = {"size": 64, "mean": [0.5, 0.25, 0.125], "std": [0.25, 0.25, 0.5], "fit": "crop"}
PREPROCESSING |= {"background": "#0a7fc3", "resize": "bilinear, antialias"}
PROGRAM = """
import json, sys
import numpy as np
sys.modules["torch_covnorm"] = None  # importing it fails
to, file, images = sys.argv[1:4]
batches = np.load(images)
answers, about = {}, {}
if to == "torch":
    import torch
    extra = {"covnorm.json": ""}
    module = torch.export.load(file, extra_files=extra).module()
    about = json.loads(extra["covnorm.json"])
    for key in batches:
        answers[key] = module(torch.from_numpy(batches[key])).detach().numpy()
else:
    import onnxruntime
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert [(i.name, i.shape) for i in session.get_inputs()] == [("images", ["n", 3, 64, 64])]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [("logits", ["n", 4])]
    strings = session.get_modelmeta().custom_metadata_map
    about = {k: v if k == "domain" else json.loads(v) for k, v in strings.items()}
    for key in batches:
        answers[key], = session.run(None, {"images": batches[key]})
    assert "torch" not in sys.modules
np.savez(images + ".answers.npz", **answers)
print(json.dumps(about))
"""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def lite0():
    """EfficientNet-Lite0 with two domains that differ only in their weights."""
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(cn.load_backbone("efficientnet-lite0"))
    for name in ("flowers", "weeds"):
        zoo.shake_(net.add_domain(name, CLASSES, preprocessing=PREPROCESSING))
    return net.eval()


@pytest.fixture(scope="module")
def exports(lite0, tmp_path_factory) -> dict[str, Exported]:
    folder = tmp_path_factory.mktemp("exports")
    return {to: export(lite0, "flowers", folder, to) for to in ENDINGS}


def small(*kinds: str, name="convnet with norms") -> cn.MultiDomainNetwork:
    net = zoo.network(name, kinds)
    for kind in kinds:
        net.domains[kind].preprocessing = {"size": 16}
    return net


def read_back(file: Path):
    """A program of torch.export or ONNX, as a function."""
    if file.suffix == ".pt2":
        return torch.export.load(file).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    return lambda x: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


@torch.no_grad()
def assert_same(net, name, run, side=16):
    for n in (1, 2, 5):
        x = torch.randn(n, 3, side, side)
        assert zoo.close(run(x), net(x, domain=name), 1e-4)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


# ── EfficientNet-Lite0 in every format ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("to", ["torch", "onnx"])
@torch.no_grad()
@pytest.mark.slow
def test_a_process_without_the_package_answers_as_the_network(lite0, exports, to, tmp_path):
    batches = {str(n): torch.randn(n, 3, 64, 64) for n in (1, 3, 8)}
    images = tmp_path / "images.npz"
    np.savez(images, **{k: v.numpy() for k, v in batches.items()})
    command = [sys.executable, "-I", "-c", PROGRAM, to, exports[to].files[0], images]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert about["classes"] == list(CLASSES)
    assert about["preprocessing"] == PREPROCESSING
    assert about["domain"] == "flowers"
    answers = np.load(f"{images}.answers.npz")
    for key, x in batches.items():
        result = torch.from_numpy(answers[key])
        assert zoo.close(result, lite0(x, domain="flowers"), 1e-4)
        assert not zoo.close(result, lite0(x, domain="weeds"), 1e-2)  # control: the wrong domain


@torch.no_grad()
def test_the_state_dict_loads_strictly_into_the_plain_class(lite0, exports):
    file = exports["state-dict"].files[0]
    plain = EfficientNetLite0(len(CLASSES)).eval()
    plain.load_state_dict(safetensors.torch.load_file(file), strict=True)
    assert_same(lite0, "flowers", plain, 64)
    assert_same(lite0, "flowers", cn.load_backbone(file), 64)
    x = torch.randn(3, 3, 64, 64)
    assert not zoo.close(plain(x), lite0(x, domain="weeds"), 1e-2)
    with safetensors.safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["covnorm"])
    assert (about["classes"], about["preprocessing"]) == (list(CLASSES), PREPROCESSING)
    assert about["layers"] == {}


@torch.no_grad()
def test_a_domain_loads_into_another_network(lite0, tmp_path):
    exported = export(lite0, "flowers", tmp_path / "new", "domain")
    assert {f.name for f in exported.files} == {f.name for f in exported.files[0].parent.iterdir()}
    assert exported.bytes == sum(f.stat().st_size for f in exported.files)
    assert exported.difference is None
    other = cn.MultiDomainNetwork(cn.load_backbone("efficientnet-lite0")).eval()
    other.load_domain(tmp_path / "new" / "flowers")
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(other(x, domain="flowers"), lite0(x, domain="flowers"))


@pytest.mark.parametrize("to", ENDINGS)
def test_the_json_file_describes_input_and_output(lite0, exports, to):
    file, beside = exports[to].files
    assert file.name == f"flowers{ENDINGS[to]}"
    assert beside.name == f"{file.name}.json"
    assert exports[to].bytes == file.stat().st_size + beside.stat().st_size
    record = records.read(beside, FORMAT)  # with its checksum
    assert (record["to"], record["domain"], record["file"]) == (to, "flowers", file.name)
    assert record["classes"] == list(CLASSES)
    assert record["preprocessing"] == PREPROCESSING
    assert record["input"]["shape"] == ["n", 3, 64, 64]
    assert record["input"]["values"] == "(RGB / 255 - mean) / std"
    assert record["output"]["shape"] == ["n", 4]
    assert record["backbone"] == {"class": "EfficientNetLite0", "fingerprint": lite0.fingerprint}
    assert record["versions"]["torch_covnorm"] == cn.__version__
    assert 0 < record["difference"] == exports[to].difference < 1e-4


def test_a_file_contains_no_paths_of_the_machine(exports, tmp_path):
    places = [str(Path(m.__file__).parent).encode() for m in (cn, torch, zoo)]
    for exported in exports.values():
        for file in exported.files:
            assert not any(place in file.read_bytes() for place in places)
    assert b"pkg.torch" not in exports["onnx"].files[0].read_bytes()
    program = torch.export.export(zoo.TinyConvNet(norms=False), (torch.randn(2, 3, 16, 16),))
    torch.export.save(program, tmp_path / "control.pt2")
    assert places[2] in (tmp_path / "control.pt2").read_bytes()


# ── every kind of domain ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [*zoo.KINDS, "covnorm", "absorbed"])
@pytest.mark.parametrize("name", ["convnet", "convnet with norms"])
@torch.no_grad()
@pytest.mark.slow
def test_every_kind_is_exported_as_the_network_runs_it(name, kind, tmp_path):
    compressed = kind in ("covnorm", "absorbed")
    net = small("residual" if compressed else kind, name=name)
    (domain,) = net.domains
    if compressed:
        moments = cn.collect(net, domain, [torch.randn(8, 3, 16, 16)])
        cn.normalize_(net, domain, moments, variance=0.9)
    if kind == "absorbed":
        cn.absorb_(net, domain)
    if name != "convnet":
        assert_same(net, domain, read_back(export(net, domain, tmp_path).files[0]))
    file, beside = export(net, domain, tmp_path, "state-dict").files
    plain = zoo.TinyConvNet(norms="norms" in name)
    plain.head = nn.Linear(8, 3)
    changed = records.read(beside, FORMAT)["layers"]
    for layer, settings in changed.items():  # the JSON is enough to build the class
        conv = plain.get_submodule(layer)
        arguments = {"groups": conv.groups, "bias": conv.bias is not None} | settings
        sizes = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding)
        plain.set_submodule(layer, nn.Conv2d(*sizes, conv.dilation, **arguments))
    plain.load_state_dict(safetensors.torch.load_file(file), strict=True)
    assert_same(net, domain, plain.eval())
    dense = kind in ("residual", "parallel", "conv", "lowrank", "covnorm", "absorbed")
    assert ("grouped.0" in changed) == dense
    assert not dense or changed["grouped.0"] == {"groups": 1}
    biased = name == "convnet" and kind not in ("own", "mask")  # no norm can absorb the bias
    assert changed.get("dilated.0") == ({"bias": True} if biased else None)


@pytest.mark.parametrize("kind", ["parallel", "mask"])
@pytest.mark.slow
def test_small_networks_as_onnx(kind, tmp_path):
    net = small(kind, name="convnet")  # with reflected padding
    assert_same(net, kind, read_back(export(net, kind, tmp_path, "onnx").files[0]))


@torch.no_grad()
def test_a_joint_domain_comes_with_its_basis_or_without_need_of_it(tmp_path):
    net = small("residual", "parallel")
    moments = {n: cn.collect(net, n, [torch.randn(8, 3, 16, 16)]) for n in net.domains}
    cn.join_(net, ["residual"], moments, 0.9)
    file = export(net, "residual", tmp_path / "a.pt2").files[0]
    assert_same(net, "residual", read_back(file))
    exported = export(net, "residual", tmp_path, "domain")
    assert len(exported.files) == 4
    other = zoo.network("convnet with norms", ())
    with pytest.raises(CovNormError, match="load_basis"):
        other.load_domain(tmp_path / "residual")
    other.load_basis(tmp_path / "residual" / "basis")
    other.load_domain(tmp_path / "residual")
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(other.eval()(x, domain="residual"), net(x, domain="residual"))


@torch.no_grad()
def test_an_own_module_is_exported_too(tmp_path):
    net = small()
    own = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    zoo.shake_(net.add_domain("a", own=own, preprocessing={"size": 16}))
    net.eval()
    assert_same(net, "a", read_back(export(net, "a", tmp_path).files[0]))
    state = safetensors.torch.load_file(export(net, "a", tmp_path, "state-dict").files[0])
    assert torch.equal(state["1.2.weight"], own[2].weight)
    assert {k for k in state if k.startswith("0.stem")} == {
        f"0.stem.{k}" for k in net.backbone.stem.state_dict()
    }


def test_vectors_and_oblong_images_and_double_precision(tmp_path):
    net = zoo.network("mlp", ("residual",))
    run = read_back(export(net, "residual", tmp_path / "mlp").files[0])
    assert zoo.close(run(x := torch.randn(4, 12)), net(x, domain="residual").detach())
    net = small("residual").double()
    file, beside = export(net, "residual", tmp_path / "wide", size=(16, 24)).files
    preprocessing = {"size": [16, 24], "mean": None, "std": None, "fit": "squash"}
    preprocessing |= {"background": None, "resize": "bilinear, antialias"}
    assert records.read(beside, FORMAT)["preprocessing"] == preprocessing
    x = torch.randn(2, 3, 16, 24)
    expected = net(x.double(), domain="residual").detach()
    assert zoo.close(read_back(file)(x), expected.float())


# ── the network, the terminal and the disk ──────────────────────────────────────────────────────


@pytest.mark.parametrize("to", [*ENDINGS, "domain"])
@pytest.mark.slow
def test_the_network_and_the_terminal_are_as_they_were(to, tmp_path, capfd, caplog):
    net = small("residual", "parallel")
    net.train()
    net.domains["residual"].norms.eval()  # a mode that differs
    modes = [m.training for m in net.modules()]
    bits = {k: v.clone() for k, v in net.state_dict().items()}
    export(net, "residual", tmp_path, to)
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(v, bits[k]) for k, v in net.state_dict().items())
    assert [p.requires_grad for p in net.parameters_of("residual")].count(False) == 0
    assert capfd.readouterr() == ("", "")
    assert not [r for r in caplog.records if r.levelname not in ("DEBUG", "INFO")]


@pytest.mark.parametrize("to", ["torch", "state-dict"])
def test_a_file_is_replaced_by_the_same_bytes(to, tmp_path):
    net = small("residual", "parallel")
    out = tmp_path / "made" / f"a{ENDINGS[to]}"
    export(net, "residual", out, to)
    first = contents(tmp_path)
    export(net, "parallel", out, to)
    other = contents(tmp_path)
    assert first.keys() == other.keys() == {f"made/{out.name}", f"made/{out.name}.json"}
    assert all(first[k] != other[k] for k in first)
    export(net, "residual", out, to)
    assert contents(tmp_path) == first


def refused(match: str, folder: Path, net, name, to="torch", out=None, **arguments):
    """Check that export raises, changes nothing on disk, and keeps the random numbers."""
    before, random = (contents(folder), sorted(folder.rglob("*"))), torch.get_rng_state()
    with pytest.raises(CovNormError, match=match):
        export(net, name, folder if out is None else out, to, **arguments)
    assert (contents(folder), sorted(folder.rglob("*"))) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_what_cannot_be_exported_is_an_error_and_writes_nothing(tmp_path):
    net = small("residual")
    refused(r"to='onx': did you mean 'onnx'", tmp_path, net, "residual", "onx")
    refused("unknown domain", tmp_path, net, "flowers")
    refused(r"a.onnx: to='torch' writes .pt2", tmp_path, net, "residual", out=tmp_path / "a.onnx")
    refused("size= in pixels", tmp_path, net, "residual", size=0)
    refused("size= in pixels", tmp_path, net, "residual", size=(3, 4, 5))
    net.domains["residual"].preprocessing = {"mean": [0.5] * 3}
    refused("'residual'.*size= in pixels", tmp_path, net, "residual")
    export(net, "residual", tmp_path / "fine", "state-dict", size=16)
    net.domains["residual"].preprocessing = {"size": 16, "mean": torch.ones(3)}
    refused("'residual'.*preprocessing.*JSON", tmp_path, net, "residual")
    net.domains["residual"].preprocessing = None
    (tmp_path / "file").write_text("")
    refused("file", tmp_path, net, "residual", out=tmp_path / "file", size=16)
    (tmp_path / "residual.pt2.json").mkdir()  # the second of two files
    refused(r"residual.pt2.json", tmp_path, net, "residual", size=16)
    with torch.no_grad():
        net.domains["residual"].head.weight[0, 0] = torch.nan
    refused("'residual' returns NaN", tmp_path, net, "residual", size=16)


class Conv(nn.Conv2d):
    """A subclass, which merging tries with random numbers."""


class Odd(nn.Module):
    """A network that tracing gets wrong, or cannot follow."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.head, self.way = Conv(3, 4, 3), nn.Linear(4, 5), way

    def forward(self, x):
        if self.way == "lies" and torch.compiler.is_compiling():
            x = x + 1
        if self.way == "looks" and x.sum() > 0:
            x = x + 1
        y = self.head(self.body(x).mean((2, 3)))
        if self.way == "counts":
            y = y + 1 if len(y) == 3 else y
        return {"logits": y} if self.way == "names" else y


@pytest.mark.parametrize("to", ["torch", "onnx"])
@pytest.mark.parametrize(
    ("way", "match"),
    [
        ("lies", r"differs from the network by .* on a batch of 1.*Choose another to="),
        ("looks", "torch.export cannot trace Odd"),
        ("counts", "torch.export cannot trace Odd for batches of any size"),
        ("names", "'a' returns a dict"),
    ],
)
def test_a_network_that_tracing_gets_wrong_is_not_written(way, match, to, tmp_path):
    net = cn.MultiDomainNetwork(Odd(way), sites=zoo.everywhere)
    net.add_domain("a", 2, preprocessing={"size": 8})
    net.eval()
    (tmp_path / f"a{ENDINGS[to]}").write_bytes(b"old")
    refused(match, tmp_path, net, "a", to)
    if way != "names":
        export(net, "a", tmp_path, "state-dict")  # needs no tracing
    export(net, "a", tmp_path, "domain")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_what_brings_it(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    brings = rf"{package}.*pip install 'torch-covnorm\[onnx\]'"
    refused(brings, tmp_path, small("residual"), "residual", "onnx")


def test_weights_beyond_one_onnx_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("torch_covnorm.engines.export"), "ONNX_LIMIT", 1000)
    refused(r"below 2 GB\. Use to='torch'", tmp_path, small("residual"), "residual", "onnx")
