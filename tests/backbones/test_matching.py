"""Files of weights in other programs' names: the same bits come out, or the file is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import zoo
from command import covnorm
from torch import nn

import torch_covnorm as cn
from torch_covnorm.backbones import VGG16, EfficientNetLite0, MobileNetV2, ResNet26, load_matched
from torch_covnorm.backbones.mobilenet_v2 import HUGGING_FACE, TIMM
from torch_covnorm.backbones.weights import Weights, load_, match, read_weights

OURS = {
    "efficientnet-lite0": EfficientNetLite0,
    "mobilenet-v2": MobileNetV2,
    "resnet26": ResNet26,
    "vgg16": lambda classes: VGG16(False, classes),
}


@pytest.fixture(scope="module")
def nets():
    """Networks of seven classes whose statistics are not trivial, by name."""
    torch.manual_seed(1)
    made = {name: make(7).eval() for name, make in OURS.items()}
    for net in made.values():
        zoo.shake_(net)
    return made


def same_outputs(net, loaded):
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        return torch.equal(net(x), loaded.eval()(x))


def anonymous(net):
    """The tensors of a network under names that say nothing but their order: layer.3.weight."""
    layers = {}
    for key in net.state_dict():
        layers.setdefault(key.rpartition(".")[0], f"layer.{len(layers)}")
    ends = ((key, *key.rpartition(".")[::2]) for key in net.state_dict())
    return {f"{layers[layer]}.{end}": net.state_dict()[key] for key, layer, end in ends}


def renamed(net, table):
    """The tensors of a network in another program's names, in our order."""
    other = {ours: theirs for theirs, ours in table.items()}
    split = ((key, *key.rpartition(".")[::2]) for key in net.state_dict())
    return {f"{other[layer]}.{end}": net.state_dict()[key] for key, layer, end in split}


@pytest.mark.parametrize(
    ("name", "wrapper", "prefix"),
    [
        ("efficientnet-lite0", "state_dict", "module."),
        ("mobilenet-v2", "model", "mobilenet_v2."),
        ("resnet26", "model_state_dict", "module.model.backbone."),
        ("resnet26", "", "model."),
        ("vgg16", "model", "backbone."),
    ],
)
def test_prefixes_and_wrappers_are_seen_through(nets, name, wrapper, prefix, tmp_path):
    state = {f"{prefix}{k}": v for k, v in nets[name].state_dict().items()}
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "weights.pth")
    loaded, matched = load_matched(name, tmp_path / "weights.pth")
    assert same_outputs(nets[name], loaded)
    assert str(matched) == f"{len(state)} tensors: {len(state)} by name"
    assert type(cn.load_backbone(tmp_path / "weights.pth")) is type(nets[name])  # recognised


@pytest.mark.parametrize("table", [TIMM, HUGGING_FACE], ids=["timm", "Hugging Face"])
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_mobilenet_loads_from_the_names_of_others(nets, table, ending, tmp_path):
    net, file = nets["mobilenet-v2"], tmp_path / f"weights{ending}"
    state = renamed(net, table)
    if table is HUGGING_FACE:  # the head is outside of the network there
        state = {f"mobilenet_v2.{k}" if "classifier" not in k else k: v for k, v in state.items()}
    (torch.save if ending == ".pth" else safetensors.torch.save_file)(state, file)
    loaded, matched = load_matched(file)
    assert same_outputs(net, loaded)
    assert len(matched.renamed) == len(state)


def test_the_names_of_timms_mobilenet_are_those_of_timm(nets):
    theirs = zoo.timm_model("mobilenetv2_100", num_classes=7)
    theirs.load_state_dict(renamed(nets["mobilenet-v2"], TIMM))
    assert list(theirs.state_dict()) == list(renamed(nets["mobilenet-v2"], TIMM))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert zoo.close(theirs.eval()(x), nets["mobilenet-v2"](x), 1e-5)


def test_timms_vgg16_whose_fc_layers_are_convolutions_has_names_that_are_known():
    with torch.device("meta"):  # half a gigabyte otherwise
        theirs, build = zoo.timm_model("vgg16"), VGG16.build
        weights = Weights(Path("vgg16.pth"), theirs.state_dict(), ordered=False)
        found = build(weights.tensors)
        matched = match(found.make(1000).state_dict(), weights, found.renames)
    assert str(matched) == "32 tensors: 26 by name, 6 by known names"
    assert matched.renamed["classifier.0.weight"] == "pre_logits.fc1.weight"


def test_a_convolution_over_its_whole_input_becomes_the_same_linear_layer(tmp_path):
    conv, linear = nn.Conv2d(6, 5, 7), nn.Linear(6 * 7 * 7, 5)
    torch.save(conv.state_dict(), tmp_path / "conv.pth")
    load_(linear, read_weights(tmp_path / "conv.pth"), "linear")
    x = torch.randn(2, 6, 7, 7)
    assert zoo.close(linear(x.flatten(1)), conv(x).flatten(1), 1e-5)
    with pytest.raises(cn.CovNormError, match=r"'weight' \(5, 6, 7, 7\) is not"):
        load_(nn.Linear(5 * 7 * 7, 6), read_weights(tmp_path / "conv.pth"), "linear")


@pytest.mark.parametrize("name", OURS)
def test_unknown_names_are_matched_by_order_and_shape(nets, name, tmp_path):
    torch.save(anonymous(nets[name]), tmp_path / "weights.pth")
    loaded, matched = load_matched(name, tmp_path / "weights.pth")
    assert same_outputs(nets[name], loaded)
    n = len(nets[name].state_dict())
    assert str(matched) == f"{n} tensors: {n} by order and shape"
    with pytest.raises(cn.CovNormError, match="Pass the backbone's name"):  # never guessed
        cn.load_backbone(tmp_path / "weights.pth")


def test_numbers_in_the_names_order_a_safetensors_file(nets, tmp_path):
    """It is sorted by name: layer.10 stands before layer.2."""
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(anonymous(nets["resnet26"]), file)
    loaded, matched = load_matched("resnet26", file)
    assert same_outputs(nets["resnet26"], loaded)
    assert len(matched.by_order) == len(nets["resnet26"].state_dict())


def test_names_without_an_order_are_ambiguous_in_a_safetensors_file(tmp_path):
    def net():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    names = ("query.weight", "query.bias", "key.weight", "key.bias")
    state = dict(zip(names, net().state_dict().values(), strict=True))
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(cn.CovNormError, match=r"'key' and 'query' have the same shape"):
        load_(net(), read_weights(tmp_path / "a.safetensors"), "net")
    torch.save(state, tmp_path / "a.pth")  # control: a .pth file has an order
    assert load_(net(), read_weights(tmp_path / "a.pth"), "net").by_order["1.bias"] == "key.bias"


# ── refused ───────────────────────────────────────────────────────────────────────────────────


def swapped(state):
    """Two convolutions of the same shape in each other's place."""
    a, b = [k for k, v in state.items() if v.shape == (64, 64, 3, 3)][1:3]
    order = [{a: b, b: a}.get(k, k) for k in state]
    return {k: state[k] for k in order}


def without(word):
    return lambda state: {k: v for k, v in state.items() if word not in k}


REFUSED = {
    "two layers of one shape are swapped": (swapped, r"'layer\.\d+' comes before 'layer\.\d+'"),
    "a layer is missing": (without("layer.5."), "'layer.6' .* is in the place of 'layer1.0.bn2'"),
    "the last layer is missing": (without("layer.51."), "nothing is in the place of 'fc'"),
    "a layer too many": (
        lambda s: {**s, "more.weight": torch.zeros(3, 3)},
        r"'more' \(weight \(3, 3\)\) is in the place of nothing",
    ),
    "another shape": (
        lambda s: {k: v[:32] if k == "layer.2.weight" else v for k, v in s.items()},
        r"'layer.2' \(weight \(32, 32, 3, 3\)\) is in the place of 'layer1.0.conv1'",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_fit_by_order_is_refused_with_the_first_mismatch(nets, change, tmp_path):
    damage, message = REFUSED[change]
    state = anonymous(nets["resnet26"])
    assert list(damage(state)) != list(state) or change == "another shape"
    torch.save(damage(state), tmp_path / "weights.pth")
    with pytest.raises(
        cn.CovNormError, match=f"weights.pth: not the weights of resnet26: .*{message}"
    ):
        cn.load_backbone("resnet26", tmp_path / "weights.pth")


@pytest.mark.parametrize("name", OURS)
def test_a_missing_layer_is_refused_and_a_missing_head_is_not(nets, name, tmp_path):
    state = dict(nets[name].state_dict())
    lost = next(k for k in list(state)[10:] if k.endswith("weight"))
    torch.save({k: v for k, v in state.items() if k != lost}, tmp_path / "weights.pth")
    with pytest.raises(cn.CovNormError, match=f"has no '{re.escape(lost)}'"):
        cn.load_backbone(name, tmp_path / "weights.pth")
    head = list(state)[-1].rpartition(".")[0]
    torch.save({k: v for k, v in state.items() if not k.startswith(head)}, tmp_path / "weights.pth")
    loaded = cn.load_backbone(name, tmp_path / "weights.pth")
    assert loaded.get_submodule(head).out_features == 1000


def test_a_tensor_of_another_shape_is_named(nets, tmp_path):
    state = dict(nets["resnet26"].state_dict())
    state["layer1.0.conv1.weight"] = torch.zeros(64, 32, 1, 1)
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(cn.CovNormError, match=r"'layer1.0.conv1.weight' \(64, 32, 1, 1\) is not"):
        cn.load_backbone("resnet26", tmp_path / "weights.pth")


def test_names_that_say_which_is_which_undo_a_swap(nets, tmp_path):
    """By name the order does not matter."""
    state = swapped(dict(nets["resnet26"].state_dict()))
    assert list(state) != list(nets["resnet26"].state_dict())
    torch.save(state, tmp_path / "weights.pth")
    assert same_outputs(nets["resnet26"], cn.load_backbone("resnet26", tmp_path / "weights.pth"))


# ── as the command shows it ───────────────────────────────────────────────────────────────────


def test_init_says_what_was_matched(nets, tmp_path):
    state = anonymous(nets["resnet26"])
    ours = {k: v for k, v in nets["resnet26"].state_dict().items() if k.startswith("conv1.")}
    state = {**ours, **{k: v for k, v in state.items() if not k.startswith("layer.0.")}}
    torch.save({f"model.{k}": v for k, v in state.items()}, tmp_path / "weights.pth")
    n = len(state)
    line = f"{n} tensors: 1 by name, {n - 1} by order and shape"
    options = ("--backbone", "resnet26", "--weights", tmp_path / "weights.pth")
    ran = covnorm("init", tmp_path / "house", *options)
    assert ran.code == 0, ran.err
    assert line in ran.out
    ran = covnorm("init", tmp_path / "other", *options, "--json")
    assert ran.json["matched"]["tensors"] == n
    assert ran.json["matched"]["by_order"]["bn1.weight"] == "model.layer.1.weight"
    assert ran.json["matched"]["renamed"] == {"conv1.weight": "model.conv1.weight"}
    assert same_outputs(nets["resnet26"], cn.Ecology(tmp_path / "house").network().backbone)
