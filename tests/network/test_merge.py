"""Guarantee 2: the merged network equals the adapted one, and is a plain network."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn


@pytest.mark.parametrize("norms", zoo.NORMS.values(), ids=zoo.NORMS)
@pytest.mark.parametrize("name", zoo.ZOO)
@torch.no_grad()
@pytest.mark.slow
def test_merged_equals_adapted_for_every_kind(name, norms):
    net = zoo.network(name, norms=norms)
    x = zoo.ZOO[name][1](3)
    bits = zoo.backbone_bits(net)
    for kind in zoo.KINDS:
        merged = net.merge(kind)
        assert type(merged) is type(net.backbone)
        assert zoo.close(merged(x), net(x, domain=kind), 1e-4)
        assert not any("forward" in vars(m) for m in merged.modules())
        assert not any(m.training or m._forward_pre_hooks for m in merged.modules())
        assert not any(p.requires_grad for p in merged.parameters())
    assert zoo.backbone_bits(net) == bits


@torch.no_grad()
def test_control_another_domains_merge_differs():
    net = zoo.network("convnet", kinds=("residual",))
    net.add_domain("twin", classes=3)
    zoo.shake_(net.domains["twin"])
    x = torch.randn(3, 3, 16, 16)
    net.eval()
    assert not zoo.close(net.merge("twin")(x), net(x, domain="residual"), 1e-3)


@pytest.mark.parametrize("absorbed", [False, True])
@torch.no_grad()
def test_a_normalised_domain_merges(absorbed):
    net = zoo.network("convnet", kinds=("residual", "parallel", "conv"))
    x = torch.randn(4, 3, 16, 16)
    for kind in net.domains:
        cn.normalize_(net, kind, cn.collect(net, kind, [x]), variance=0.9)
        if absorbed:
            cn.absorb_(net, kind)
        assert zoo.close(net.merge(kind)(x), net(x, domain=kind), 1e-4)


def test_merging_adds_no_layer_and_no_cost():
    """Same modules and weight shapes except the head; only grouped layers become dense."""
    net = zoo.network("timm resnet18", kinds=("residual",))
    merged = net.merge("residual")
    assert [n for n, _ in merged.named_modules()] == [n for n, _ in net.backbone.named_modules()]
    for name, tensor in net.backbone.state_dict().items():
        if not name.startswith(net.head_name):
            assert merged.state_dict()[name].shape == tensor.shape


def test_a_grouped_layer_becomes_dense_only_where_it_must():
    net = zoo.network("convnet", kinds=("residual", "batchnorm"))
    assert net.merge("residual").grouped[0].groups == 1
    assert net.merge("batchnorm").grouped[0].groups == 4


def test_the_own_module_comes_along():
    net = cn.MultiDomainNetwork(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), head=None)
    net.add_domain("a", own=nn.Linear(6, 2))
    net.eval()
    x = torch.randn(3, 6)
    assert zoo.close(net.merge("a")(x), net(x, domain="a"))
