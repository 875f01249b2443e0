"""Where adapters go by default, and the warnings and errors for other sites."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn


def default_sites(model: nn.Module) -> list[str]:
    return list(cn.MultiDomainNetwork(model).sites)


def test_vgg16_has_the_papers_13_convolutions():
    names = default_sites(zoo.ZOO["vgg16"][0]())
    assert len(names) == 13
    assert names[0] == "features.0"


def test_resnets_adapt_every_convolution_but_the_expanding_shortcuts():
    net = cn.MultiDomainNetwork(zoo.timm_model("resnet18"))
    convolutions = [
        n for n, m in net.backbone.named_modules() if isinstance(m, nn.Conv2d) and "down" not in n
    ]
    assert list(net.sites) == convolutions
    assert net.sites["layer2.0.conv1"].norm_behind == "layer2.0.bn1"
    assert len(default_sites(zoo.ZOO["resnet26"][0]())) == 25


@pytest.mark.parametrize(
    "name", ["tf_efficientnet_lite0", "efficientnet_b0", "mobilenetv2_100", "mobilenetv3_small_100"]
)
def test_depthwise_nets_adapt_their_projections_only(name):
    net = cn.MultiDomainNetwork(zoo.timm_model(name))
    for site, kind in net.sites.items():
        layer = net.backbone.get_submodule(site)
        assert site.startswith("blocks")
        assert layer.kernel_size == (1, 1)
        assert kind.d_out <= kind.d_in
        assert ".se." not in site
        assert kind.norm_behind is not None


def test_vit_adapts_what_writes_into_the_residual_stream():
    names = default_sites(zoo.timm_model("vit_tiny_patch16_224"))
    assert "blocks.0.attn.proj" in names
    assert "blocks.0.mlp.fc2" in names
    assert not any("qkv" in n or "fc1" in n for n in names)


def test_the_weight_of_attentions_out_proj_is_no_site():
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 2))
    assert default_sites(model) == ["0"]
    with pytest.raises(cn.CovNormError, match="out_proj"):
        cn.MultiDomainNetwork(model, sites=zoo.everywhere)


def test_an_adapter_that_outweighs_its_layer_is_said():
    with pytest.warns(cn.CovNormWarning, match=r"outweighs its layer at 1 of 1 sites \(0\)"):
        cn.MultiDomainNetwork(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)))


def test_heads_are_found_named_or_absent():
    assert cn.MultiDomainNetwork(zoo.mlp()).head_name == "5"
    net = cn.MultiDomainNetwork(zoo.mlp(), head=None)
    assert "5" in net.sites
    net = cn.MultiDomainNetwork(zoo.mlp(), head="2")
    assert "5" in net.sites
    assert "2" not in net.sites
    with pytest.raises(cn.CovNormError, match="head='x'"):
        cn.MultiDomainNetwork(zoo.mlp(), head="x")


def test_a_convolution_can_be_the_head():
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    net = cn.MultiDomainNetwork(backbone, head="2")
    net.add_domain("a", 6)
    net.add_domain("b", 2)
    net.eval()
    x = torch.randn(2, 3, 8, 8)
    assert net(x, domain="a").shape == (2, 6, 6, 6)
    assert [a.shape for a in net(x, domain=["a", "b"])] == [(6, 6, 6), (2, 6, 6)]


def test_a_network_without_a_head_says_how_to_name_one():
    net = cn.MultiDomainNetwork(nn.Sequential(nn.Conv2d(3, 8, 3)))
    with pytest.raises(cn.CovNormError, match="no head"):
        net.add_domain("a", 6)
