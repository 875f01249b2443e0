"""Backbones that are not a plain list of layers: correct outputs, or an error that says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_covnorm as cn


def wrapped(backbone: nn.Module, *classes: int, **arguments) -> cn.MultiDomainNetwork:
    """Shaken domains a, b, … with these numbers of classes, in eval mode."""
    net = cn.MultiDomainNetwork(backbone, **arguments)
    for name, count in zip("abc", classes, strict=False):
        zoo.shake_(net.add_domain(name, count))
    return net.eval()


class Net(nn.Module):
    """Two Linear layers and a head, run by a function."""

    def __init__(self, run, **layers: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


@torch.no_grad()
def test_the_fused_transformer_layer_does_not_bypass_its_adapters():
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    net = wrapped(nn.Sequential(layer, nn.Linear(16, 4)), 3)
    x = torch.randn(2, 5, 16)
    merged = net.merge("a")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = merged(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert zoo.close(net(x, domain="a"), expected)
    assert cn.collect(net, "a", [x])["0.linear1"].n == 10


def test_attentions_output_weight_is_no_head():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    assert cn.MultiDomainNetwork(model).head_name == "1"


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_an_error_that_says_so(reentrant):
    def run(net, x):
        return net.head(checkpoint(net.two, net.one(x), use_reentrant=reentrant))

    net = wrapped(Net(run), 3).train()
    out = net(torch.randn(4, 8), domain="a")
    with pytest.raises(cn.CovNormError, match="checkpointing"):
        out.sum().backward()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_folded_layers_keep_the_memory_format_that_the_backbone_counts_on(memory):
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 5)

        def forward(self, x):
            z = self.conv(x)
            assert z.is_contiguous(memory_format=memory)
            return self.head(z.reshape(len(x), -1))

    net = wrapped(Flat().to(memory_format=memory), 3)
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=memory)
    merged = net.merge("a")
    assert zoo.close(merged(x), net(x, domain="a"))
    assert merged.conv.weight.is_contiguous(memory_format=memory)


def test_a_layer_that_changes_its_weight_is_adapted_but_not_merged():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, w / w.std(), self.bias, padding=1)

    backbone = nn.Sequential(
        Standardised(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    )
    net = wrapped(backbone, 3, 3)
    x = torch.randn(2, 3, 8, 8)
    mixed = net(x, domain=["a", "b"]).detach()
    assert zoo.close(mixed[1], net(x, domain="b")[1])
    stepwise = net(x, domain="a").detach()
    with torch.no_grad():
        assert zoo.close(net(x, domain="a"), stepwise)
    with pytest.raises(cn.CovNormError, match="site '0': Standardised changes its weight"):
        net.merge("a")
    plain = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(cn.CovNormError, match="parametrization"):
        wrapped(plain, 2).merge("a")


@torch.no_grad()
def test_a_head_under_two_names_is_replaced_under_both():
    head = nn.Linear(8, 5)
    net = wrapped(Net(lambda n, x: n.alias(n.two(n.one(x))), head=head, alias=head), 3)
    x = torch.randn(4, 8)
    assert zoo.close(net.merge("a")(x), net(x, domain="a"))


def test_a_convolutional_head_keeps_its_shape():
    head = nn.Conv2d(8, 4, 3, padding=2, dilation=2, padding_mode="reflect")
    net = wrapped(nn.Sequential(nn.Conv2d(3, 8, 3), head), 6, head="1")
    assert net(torch.randn(1, 3, 10, 10), domain="a").shape == (1, 6, 8, 8)


@torch.no_grad()
def test_answers_a_token_are_cut_to_their_own_classes():
    net = wrapped(Net(lambda n, x: n.head(n.two(n.one(x)))), 3, 7)
    x = torch.randn(2, 6, 8)
    short, long = net(x, domain=["a", "b"])
    assert zoo.close(short, net(x, domain="a")[0])
    assert zoo.close(long, net(x, domain="b")[1])


def test_domains_with_and_without_a_head_do_not_share_a_batch():
    net = wrapped(Net(lambda n, x: n.head(n.two(n.one(x)))), 9)
    net.add_domain("bare", own=nn.Linear(8, 2))
    net.eval()
    assert net(torch.randn(2, 8), domain="bare").shape == (2, 2)
    with pytest.raises(cn.CovNormError, match="with and without a head"):
        net(torch.randn(2, 8), domain=["a", "bare"])


def test_a_replaced_layer_is_noticed():
    net = zoo.network("convnet with norms", kinds=("residual",))
    net.backbone.stem[1] = nn.BatchNorm2d(8)
    with pytest.raises(cn.CovNormError, match=r"'stem.1' of the backbone was replaced"):
        net.eval()


def test_a_loaded_state_is_a_new_backbone_for_the_files(tmp_path):
    net, other = wrapped(zoo.mlp(), 3), wrapped(zoo.mlp(), 3)
    before = other.fingerprint
    assert before != net.fingerprint
    other.load_state_dict(net.state_dict())
    assert other.fingerprint == net.fingerprint
    net.save_domain("a", tmp_path)
    other.load_domain(tmp_path, name="again")


def test_a_name_is_looked_up_as_it_is_spelt():
    net = zoo.network("mlp", kinds=())
    net.add_domain("a.b", 2)
    for name in ("a/b", ["a/b", "a.b"]):
        with pytest.raises(cn.CovNormError, match="unknown domain 'a/b'"):
            net(torch.randn(2, 12), domain=name)
    with pytest.raises(cn.CovNormError, match="name of a domain for each"):
        net(torch.randn(2, 12), domain=[["a.b"], ["a.b"]])


def test_norms_keep_the_precision_that_the_backbones_have():
    backbone = zoo.TinyConvNet(norms=True).bfloat16()
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    net = cn.MultiDomainNetwork(backbone)
    net.add_domain("a", 2, norms="own")
    assert net.domains["a"].norms["stem.1"].weight.dtype == torch.float32
    assert net.domains["a"].head.weight.dtype == torch.bfloat16


def test_layers_called_by_keyword_are_sites_too():
    net = wrapped(Net(lambda n, x: n.head(input=n.two(input=n.one(input=x)))), 3)
    assert net(torch.randn(2, 8), domain="a").shape == (2, 3)


def test_most_channels_dead_and_a_broken_A_are_no_crash():
    """d = 300 with 20 live channels; LAPACK can fail to converge on the whole matrix."""
    x = torch.zeros(48, 300)
    x[:, ::15] = torch.randn(48, 20) * 1e-6
    E, P = cn.Moments(300).update(x).pca()
    assert torch.allclose(P.T @ P, torch.eye(300, dtype=P.dtype), atol=1e-10)
    assert (E[20:] == 0).all()
    net = wrapped(zoo.mlp(), 3)
    moments = cn.collect(net, "a", [torch.randn(20, 12)])
    with torch.no_grad():
        net.domains["a"].adapters["2"].A.A[0, 0] = torch.nan
    with pytest.raises(cn.CovNormError, match="site '2': A contains NaN"):
        cn.normalize_(net, "a", moments)
