"""Guarantee 6: a mixed batch equals each sample run separately with its domain."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torch_covnorm as cn

TOLERANCE = 1e-4  # of the largest logit, float32; a wrong domain is off by far more (control)


@torch.no_grad()
def alone(net: cn.MultiDomainNetwork, x: torch.Tensor, names: list[str]) -> list[torch.Tensor]:
    return [net(x[i : i + 1], domain=name)[0] for i, name in enumerate(names)]


def same(mixed, single) -> list[bool]:
    return [zoo.close(a, b, TOLERANCE) for a, b in zip(mixed, single, strict=True)]


@pytest.mark.parametrize("norms", zoo.NORMS.values(), ids=zoo.NORMS)
@pytest.mark.parametrize("name", zoo.ZOO)
@torch.no_grad()
@pytest.mark.slow
def test_a_mixed_batch_equals_its_samples_run_alone(name, norms):
    net = zoo.network(name, norms=norms)
    names = [*zoo.KINDS, "conv", "residual", "lowrank"]
    x = zoo.ZOO[name][1](len(names))
    assert all(same(net(x, domain=names), alone(net, x, names)))


@pytest.mark.parametrize("norms", zoo.NORMS.values(), ids=zoo.NORMS)
@pytest.mark.parametrize("name", zoo.ZOO)
@torch.no_grad()
@pytest.mark.slow
def test_control_one_wrong_domain_differs(name, norms):
    """Two domains of one kind, so that only their numbers differ."""
    net = zoo.network(name, kinds=("residual",), norms=norms)
    net.add_domain("twin", classes=3, norms=norms[-1])
    zoo.shake_(net.domains["twin"])
    net.eval()
    x = zoo.ZOO[name][1](4)
    right = ["residual", "twin", "twin", "residual"]
    wrong = ["residual", "twin", "residual", "residual"]
    assert same(net(x, domain=wrong), alone(net, x, right)) == [True, True, False, True]


@torch.no_grad()
def test_channels_last_batches_are_mixed_alike():
    for name in ("convnet", "convnet with norms", "efficientnet-lite0"):
        net = zoo.network(name).to(memory_format=torch.channels_last)
        x = zoo.ZOO[name][1](len(zoo.KINDS)).contiguous(memory_format=torch.channels_last)
        assert all(same(net(x, domain=list(zoo.KINDS)), alone(net, x, list(zoo.KINDS))))


@settings(max_examples=65, deadline=None)
@given(st.data())
def test_any_order_duplicates_ranks_and_heads(data):
    """Drawn kinds, ranks, class counts and own modules in one batch, CovNorm among them."""
    name = data.draw(st.sampled_from(zoo.SMALL))
    net = zoo.network(name, kinds=())
    x = zoo.ZOO[name][1](6)
    kinds = data.draw(st.lists(st.sampled_from(zoo.KINDS), min_size=1, max_size=4))
    kinds += data.draw(st.sampled_from([[], ["own"], ["mask"]]))  # runs as a separate pass
    for i, kind in enumerate(kinds):
        rank = data.draw(st.integers(1, 9)) if kind in ("residual", "parallel") else None
        classes = data.draw(st.integers(1, 6))
        own = nn.Linear(classes, data.draw(st.integers(1, 4))) if data.draw(st.booleans()) else None
        norms = None if kind in zoo.TRAIN_NORMS else data.draw(st.sampled_from(zoo.NORMS["mixed"]))
        net.add_domain(f"d{i}", classes, kind, rank, own=own, norms=norms)
        zoo.shake_(net.domains[f"d{i}"])
        if kind not in zoo.TRAIN_NORMS and data.draw(st.booleans()):
            moments = cn.collect(net, f"d{i}", [x])
            cn.normalize_(net, f"d{i}", moments, variance=data.draw(st.floats(0.3, 1)))
            if data.draw(st.booleans()):
                cn.absorb_(net, f"d{i}")
    net.eval()
    names = data.draw(st.lists(st.sampled_from(list(net.domains)), min_size=6, max_size=6))
    with torch.no_grad():
        assert all(same(net(x, domain=names), alone(net, x, names)))


def test_logits_are_a_tensor_where_heads_agree_and_a_list_where_they_differ():
    net = zoo.network("mlp", kinds=())
    for name, classes in (("a", 3), ("b", 3), ("c", 4)):
        net.add_domain(name, classes)
    x = torch.randn(2, 12)
    assert net(x, domain=["a", "b"]).shape == (2, 3)
    assert [len(row) for row in net(x, domain=["a", "c"])] == [3, 4]


def test_gradients_flow_through_a_mixed_eval_batch():
    net = zoo.network("convnet", kinds=("residual", "parallel"))
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    sum(row.sum() for row in net(x, domain=["residual", "parallel"])).backward()
    mixed = x.grad.clone()
    x.grad = None
    for i, name in enumerate(("residual", "parallel")):
        net(x[i : i + 1], domain=name).sum().backward()
    assert zoo.close(mixed, x.grad)
    assert all(p.grad is not None for p in net.domains["parallel"].adapters.parameters())


def test_the_waste_of_padding_is_shown():
    net = zoo.network("mlp", kinds=())
    net.add_domain("thin", 2, rank=1)
    net.add_domain("wide", 2, rank=9)
    assert set(net.padded_share(["thin", "thin"]).values()) == {0.0}
    assert net.padded_share(["thin", "wide"])["2"] == pytest.approx(1 - (20 + 180) / 360)


@pytest.mark.parametrize("norms", ["shared", "sites", "own"])
def test_a_norm_that_keeps_no_statistics_refuses_to_mix(norms):
    backbone = torch.nn.Sequential(
        torch.nn.Linear(4, 4),
        torch.nn.BatchNorm1d(4, track_running_stats=False),
        torch.nn.Linear(4, 2),
    )
    net = cn.MultiDomainNetwork(backbone)
    for name in "ab":
        net.add_domain(name, 2, norms=norms)
    net.eval()
    with pytest.raises(cn.CovNormError, match="running statistics"):
        net(torch.randn(2, 4), domain=["a", "b"])


def test_samples_that_cannot_be_told_apart_are_refused():
    class Windows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.inner(x.reshape(-1, 4)).reshape(len(x), -1, 4).mean(1))

    net = cn.MultiDomainNetwork(Windows())
    for name in "ab":
        net.add_domain(name, 2)
    net.eval()
    assert net(torch.randn(2, 8), domain="a").shape == (2, 2)
    with pytest.raises(cn.CovNormError, match="told apart"):
        net(torch.randn(2, 8), domain=["a", "b"])


@pytest.mark.parametrize("name", zoo.SMALL)
@torch.no_grad()
def test_autocast_other_dtypes_and_an_empty_batch(name):
    net = zoo.network(name)
    kinds = list(zoo.KINDS)
    x = zoo.ZOO[name][1](len(kinds))
    exact = net(x, domain=kinds)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(
            zoo.close(a.float(), b, 0.1) for a, b in zip(net(x, domain=kinds), exact, strict=True)
        )
    double = copy.deepcopy(net).double()
    answers = double(x.double(), domain=kinds)
    assert all(zoo.close(a.float(), b, 1e-4) for a, b in zip(answers, exact, strict=True))
    for kind in kinds:
        assert len(net(x[:0], domain=kind)) == 0


@torch.no_grad()
def test_tokens_in_a_grid_are_positions_of_their_sample():
    class Grid(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.inner(x).mean((1, 2)))

    net = cn.MultiDomainNetwork(Grid())
    for name in "ab":
        net.add_domain(name, 3)
        zoo.shake_(net.domains[name])
    net.eval()
    x, names = torch.randn(4, 5, 6, 8), ["a", "b", "b", "a"]
    assert all(same(net(x, domain=names), alone(net, x, names)))
    assert zoo.close(net.merge("a")(x), net(x, domain="a"))


def test_with_gradients_a_mixed_batch_gives_the_same_answers():
    net = zoo.network("convnet", kinds=("residual", "lowrank"))
    x, names = torch.randn(2, 3, 16, 16), ["lowrank", "residual"]
    out = net(x, domain=names)
    assert all(row.requires_grad for row in out)
    assert all(same(out, alone(net, x, names)))


@torch.no_grad()
@pytest.mark.slow
def test_a_float64_network_is_float64_throughout():
    """Norms that are subclasses (timm's, with an activation inside) follow too."""
    net = zoo.network("timm efficientnet-lite0", kinds=("residual",)).double()
    net.add_domain("twin", classes=3)
    zoo.shake_(net.domains["twin"])
    net.eval()
    assert {p.dtype for p in net.domains["twin"].parameters()} == {torch.float64}
    x, names = torch.randn(4, 3, 32, 32).double(), ["twin", "residual", "twin", "twin"]
    for a, b in zip(net(x, domain=names), alone(net, x, names), strict=True):
        assert zoo.close(a, b, 1e-10)
    moments = cn.collect(net, "twin", [x])
    before = net(x, domain="twin")
    cn.normalize_(net, "twin", moments, variance=1.0)
    assert zoo.close(net(x, domain="twin"), before, 1e-9)
    assert zoo.close(net.merge("twin")(x), before, 1e-9)
