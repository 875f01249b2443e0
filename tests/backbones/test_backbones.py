"""Networks by name and by file; independent checks against timm and real images."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import zoo
from sklearn.datasets import load_sample_images

import torch_covnorm as cn
from torch_covnorm.backbones import VGG16, EfficientNetLite0, ResNet26


def test_lite0_is_the_published_network_as_timm_builds_it():
    ours = cn.load_backbone("efficientnet-lite0")
    timms = zoo.timm_model("tf_efficientnet_lite0")
    assert timms.state_dict().keys() == ours.state_dict().keys()
    timms.load_state_dict(ours.state_dict())
    for side in (64, 75, 224):  # odd sides: the padding is TensorFlow's
        x = torch.randn(2, 3, side, side)
        with torch.no_grad():
            assert zoo.close(ours(x), timms.eval()(x), 1e-4)


def test_lite0_knows_what_is_in_a_photograph():
    """scikit-learn's two photographs: a Chinese temple, a flower."""
    net = cn.load_backbone("efficientnet-lite0")
    images = np.stack(load_sample_images().images)
    x = torch.tensor(images).permute(0, 3, 1, 2).float()
    x = F.interpolate(x[:, :, :, 106:533], size=(224, 224), mode="bilinear", antialias=True)
    with torch.no_grad():
        temple, flower = net((x - 127) / 128).softmax(1)
    assert {663, 698, 832} & set(temple.topk(3).indices.tolist())  # monastery, palace, stupa
    assert {985, 986, 308, 309, 723} & set(flower.topk(5).indices.tolist())  # daisy … and its bees
    assert sum(p.numel() for p in net.parameters()) == 4_652_008


def test_vgg16_has_torchvisions_keys_and_shapes():
    shapes = {k: tuple(v.shape) for k, v in VGG16(fc=False, num_classes=5).state_dict().items()}
    assert shapes["features.0.weight"] == (64, 3, 3, 3)
    assert shapes["features.28.weight"] == (512, 512, 3, 3)
    assert sum(np.prod(s) for k, s in shapes.items() if k.startswith("features")) == 14_714_688
    with torch.device("meta"):
        full = VGG16()
    assert tuple(full.state_dict()["classifier.6.weight"].shape) == (1000, 4096)


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize(
    "make", [lambda: VGG16(fc=False, num_classes=3), lambda: ResNet26(7), EfficientNetLite0]
)
@pytest.mark.slow
def test_a_file_of_weights_is_recognised(make, ending, tmp_path):
    net = make().eval()
    file = tmp_path / f"weights{ending}"
    if ending == ".pth":
        torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, file)
    else:
        safetensors.torch.save_file(net.state_dict(), file)
    loaded = cn.load_backbone(file)
    x = torch.randn(1, 3, 64, 64)
    assert type(loaded) is type(net)
    with torch.no_grad():
        assert torch.equal(loaded(x), net(x))


def test_the_decathlons_published_names_load(tmp_path):
    """The residual-adapter authors' names: conv_task modules with lists of norms and heads."""
    net = ResNet26(5).eval()
    published = {}
    for key, value in net.state_dict().items():
        parts = key.split(".")
        if key.startswith("conv1."):
            key = key.replace("conv1.", "pre_layers_conv.conv.")
        elif key.startswith("bn1."):
            key = key.replace("bn1.", "pre_layers_conv.bns.0.")
        elif key.startswith("end_bn."):
            key = key.replace("end_bn.", "end_bns.0.0.")
        elif key.startswith("fc."):
            key = key.replace("fc.", "linears.0.")
        else:
            place = {"conv1": "conv1.conv", "bn1": "conv1.bns.0", "conv2": "conv2.1.conv"}
            place["bn2"] = "conv2.1.bns.0"
            key = ".".join([*parts[:2], place[parts[2]], *parts[3:]])
        published[key] = value
    file = tmp_path / "published.pth"
    torch.save(published, file)
    loaded = cn.load_backbone(file)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(x), net(x))
    published["layer1.0.conv1.parallel_conv.0.conv.weight"] = torch.zeros(64, 32, 1, 1)
    torch.save(published, file)
    with pytest.raises(cn.CovNormError, match="trained with adapters inside"):
        cn.load_backbone(file)


def test_resnet26_is_the_decathlons():
    """Its description: 64 px → 8 px × 256 channels, shortcut by pooling and zero channels."""
    net = ResNet26(4).eval()
    assert len([m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]) == 25
    block = net.layer1[0]
    for p in (block.bn2.weight, block.bn2.bias):
        torch.nn.init.zeros_(p)  # without the residual branch, only the shortcut is left
    x = torch.rand(1, 32, 8, 8)
    with torch.no_grad():
        out = block(x)
    assert torch.allclose(out[:, :32], F.avg_pool2d(x, 2))
    assert not out[:, 32:].any()


def test_timm_models_come_by_name(tmp_path):
    net = cn.load_backbone("resnet18", weights="random")
    file = tmp_path / "r18.safetensors"
    safetensors.torch.save_file(net.state_dict(), file)
    again = cn.load_backbone("resnet18", weights=file)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(x), net(x))
    with pytest.raises(cn.CovNormError, match="not the weights of resnet34"):
        cn.load_backbone("resnet34", weights=file)


def test_random_weights_give_a_warning():
    with pytest.warns(cn.CovNormWarning, match="random weights"):
        cn.load_backbone("resnet26")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no-such-net", None, "backbone 'no-such-net'"),
        ("missing.pth", None, "cannot be read"),
        ("garbage.pth", b"garbage", "cannot be read"),
        ("garbage.safetensors", b"garbage", "cannot be read"),
        ("code.pth", pickle.dumps(print), "cannot be read"),
        (
            "other.pth",
            {"a.weight": torch.zeros(2)},
            "not the weights of efficientnet-lite0 or mobilenet-v2 or vgg16 or resnet26",
        ),
        ("list.pth", [1, 2], "no state dict"),
    ],
)
def test_a_file_that_is_not_a_backbone_is_an_error_with_its_name(name, content, message, tmp_path):
    path = tmp_path / name if "." in name else name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(cn.CovNormError, match=message) as caught:
        cn.load_backbone(path)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        ("ModuleNotFoundError('timm')", r"need torch-covnorm\[timm\]"),
        (
            "RuntimeError('operator torchvision::nms does not exist')",
            "torchvision that fits torch.*nms",
        ),
    ],
)
def test_a_timm_that_cannot_be_imported_costs_no_traceback(raises, message, tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text(f"raise {raises}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(cn.CovNormError, match=f"did you mean 'efficientnet-lite0'.*{message}"):
        cn.load_backbone("efficientnet-lite")


def test_two_files_of_weights_are_one_too_many(tmp_path):
    with pytest.raises(cn.CovNormError, match="leave out weights="):
        cn.load_backbone(tmp_path / "a.pth", weights=tmp_path / "b.pth")
