"""One frozen network, many domains: guarantees 6 to 9, and bad input."""

from __future__ import annotations

import contextlib
import copy
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn
from torch_covnorm.network.sites import find_head, find_sites


def one_step(net: cn.MultiDomainNetwork, name: str, x: torch.Tensor) -> None:
    net.train()
    optimizer = torch.optim.SGD(net.parameters_of(name), lr=0.1)
    net(x, domain=name).square().mean().backward()
    optimizer.step()
    net.eval()


# ── guarantee 7: an unknown domain is an error, never silently the bare backbone ──────────────


@pytest.mark.parametrize("domain", ["nobody", "Residual", "", None, 7])
def test_unknown_domain_is_an_error(domain):
    net = zoo.network("mlp")
    with pytest.raises(cn.CovNormError, match="domain"):
        net(torch.randn(2, 12), domain=domain)
    with pytest.raises(cn.CovNormError, match="unknown domain"):
        net(torch.randn(2, 12), domain=["residual", "nobody"])


def test_unknown_domain_names_the_nearest():
    with pytest.raises(cn.CovNormError, match="did you mean 'residual'"):
        zoo.network("mlp")(torch.randn(2, 12), domain="residul")


# ── guarantee 8: domains do not touch each other, nothing touches the backbone ────────────────


@pytest.mark.parametrize("norms", ["shared", "sites", "own"])
@pytest.mark.parametrize("name", ["convnet", "convnet with norms", "mlp", "efficientnet-lite0"])
@torch.enable_grad()
@pytest.mark.slow
def test_other_domains_and_the_backbone_keep_every_bit(name, norms, tmp_path):
    net = zoo.network(name)
    x = zoo.ZOO[name][1](4)
    bits, answers = zoo.backbone_bits(net), {k: net(x, domain=k).detach() for k in zoo.KINDS}
    net.add_domain("new", classes=9, norms=norms)
    one_step(net, "new", x)
    cn.normalize_(net, "new", cn.collect(net, "new", [x, x]), variance=0.9)
    one_step(net, "new", x)
    cn.absorb_(net, "new")
    net.save_domain("new", tmp_path)
    net.remove_domain("new")
    net.load_domain(tmp_path)
    net(x, domain="new")
    assert zoo.backbone_bits(net) == bits
    for kind, answer in answers.items():
        assert torch.equal(net(x, domain=kind), answer)


def test_the_bit_test_sees_one_changed_bit():
    net = zoo.network("convnet with norms")
    bits = zoo.backbone_bits(net)
    net.backbone.stem[1].running_mean[0] += 1e-7
    assert zoo.backbone_bits(net) != bits


@pytest.mark.parametrize("norms", ["shared", "sites", "own"])
def test_training_mode_leaves_the_backbones_own_norms_alone(norms):
    net = zoo.network("convnet with norms", norms=(norms,)).train()
    bits = zoo.backbone_bits(net)
    net.backbone(torch.randn(4, 3, 16, 16))  # outside any domain
    net(torch.randn(4, 3, 16, 16), domain="residual")
    assert zoo.backbone_bits(net) == bits


def test_outside_a_call_the_backbone_is_the_plain_network():
    torch.manual_seed(0)
    backbone = zoo.TinyConvNet(norms=True).eval()
    x = torch.randn(2, 3, 16, 16)
    before = backbone(x)
    net = cn.MultiDomainNetwork(backbone)
    net.add_domain("a", 3)
    net(x, domain="a")
    assert torch.equal(net.backbone(x), before)
    assert type(net.backbone) is zoo.TinyConvNet


# ── guarantee 9: the domain is chosen per call ────────────────────────────────────────────────


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.slow
def test_sixteen_threads_with_random_domains_equal_the_serial_answers(gradients):
    net = zoo.network("convnet with norms", norms=zoo.NORMS["mixed"])
    net.requires_grad_(False)
    x = torch.randn(3, 3, 16, 16)
    batches = [["residual", "conv", "conv"], ["lowrank", "parallel", "lowrank"]]
    with torch.set_grad_enabled(gradients):
        serial = {k: net(x, domain=k) for k in zoo.KINDS}
        mixed = [net(x, domain=names) for names in batches]
    assert not torch.equal(serial["residual"], serial["conv"][:, :3])

    @torch.set_grad_enabled(gradients)
    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(30):
            kind = draw.choice(zoo.KINDS)
            assert torch.equal(net(x, domain=kind), serial[kind])
            i = draw.randrange(2)
            answers = net(x, domain=batches[i])
            assert all(torch.equal(a, b) for a, b in zip(answers, mixed[i], strict=True))
            names = [draw.choice(("own", "mask", *zoo.KINDS)) for _ in range(3)]
            answers = net(x, domain=names)  # weights that are replaced: more than one pass
            assert all(zoo.close(answers[i], serial[n][i]) for i, n in enumerate(names))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [None] * 16  # raises what a thread raised


def test_a_call_inside_a_call_keeps_its_own_domain():
    inner = zoo.network("mlp")
    x = torch.randn(2, 12)
    expected = inner(x, domain="conv")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)
            self.head = nn.Linear(12, 2)

        def forward(self, x):
            self.seen = inner(x, domain="conv")
            return self.head(self.first(x))

    net = cn.MultiDomainNetwork(Outer())
    net.add_domain("a", 2)
    net(x, domain="a")
    assert torch.equal(net.backbone.seen, expected)


# ── what a domain owns ────────────────────────────────────────────────────────────────────────


def test_only_the_domains_own_parameters_train():
    net = zoo.network("convnet with norms", kinds=("residual",)).train()
    net.add_domain("other", 2)
    net(torch.randn(4, 3, 16, 16), domain="residual").sum().backward()
    own = set(net.parameters_of("residual"))
    assert own
    assert all(p.grad is not None for p in own)
    assert all(p.grad is None for p in set(net.parameters()) - own)


def test_an_adapter_says_what_trains_and_what_the_paper_counts():
    net = zoo.network("convnet", kinds=("residual",))
    adapter = net.domains["residual"].adapters["strided.0"]
    assert set(adapter.trains) == {
        *("A.A", "A.bias", "B1.weight", "B1.bias", "B2.weight", "B2.bias")
    }
    assert adapter.paper_count() == 12 * 12


def test_a_domain_takes_the_backbones_preprocessing_unless_it_has_its_own():
    net = zoo.network("efficientnet-lite0", kinds=("residual",))
    assert net.domains["residual"].preprocessing == net.backbone.preprocessing
    net.add_domain("own", 2, preprocessing={"size": 32})
    assert net.domains["own"].preprocessing == {"size": 32}


def test_an_own_module_runs_behind_the_backbone_and_trains():
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3, padding=1)

        def forward(self, x, scale=1.0):
            return scale * self.conv(x)

    net = cn.MultiDomainNetwork(Features(), head=None).eval()
    segment = nn.Conv2d(6, 2, 1)
    net.add_domain("seg", own=segment, classes=["sky", "ground"])
    net.add_domain("bare")
    x = torch.randn(2, 3, 8, 8)
    assert net(x, domain="seg").shape == (2, 2, 8, 8)
    assert torch.allclose(
        net(x, domain="seg"),
        segment(net.domains["seg"].adapters["conv"](net.backbone.conv, x)),
        atol=1e-6,
    )
    assert net(x, domain="bare").shape == (2, 6, 8, 8)
    assert set(segment.parameters()) <= set(net.parameters_of("seg"))
    mixed = net(x, domain=["seg", "bare"])
    assert [a.shape for a in mixed] == [(2, 8, 8), (6, 8, 8)]
    # other arguments pass through
    assert zoo.close(net(x, domain="bare", scale=3.0), 3 * net(x, domain="bare"))


def test_a_container_of_own_modules_is_kept_but_not_called():
    net = zoo.network("mlp", kinds=())
    box = nn.ModuleDict({"boxes": nn.Linear(4, 4)})
    net.add_domain("a", 4, own=box)
    x = torch.randn(2, 12)
    assert net(x, domain="a").shape == (2, 4)
    assert set(box.parameters()) <= set(net.parameters_of("a"))
    assert zoo.close(net.merge("a")(x), net(x, domain="a"))


def test_parameters_as_the_paper_counts_them():
    """VGG16: 13 convolutions 1,810,432; with fc6 and fc7 35,364,864 of 138,357,544."""
    from torch_covnorm.backbones import VGG16

    for fc, expected in ((False, 1_810_432), (True, 35_364_864)):
        with torch.device("meta"):
            backbone = VGG16(fc)
        sites = find_sites(backbone, None, find_head(backbone, "auto"))
        assert sum(s.d_out**2 for s in sites.values()) == expected
    assert sum(p.numel() for p in backbone.parameters()) == 138_357_544
    net = zoo.network("efficientnet-lite0", kinds=("residual",))
    count = net.num_parameters("residual")
    assert count["adapter"] == 311_296
    assert count["total"] == sum(p.numel() for p in net.domains["residual"].parameters())
    assert count["head"] == 1280 * 3 + 3


def test_names_with_dots_and_reserved_words_are_domains_like_others():
    net = zoo.network("mlp", kinds=())
    for name in ("a.b", "a", "train", "forward", "items", "0"):
        net.add_domain(name, 2)
    assert list(net.domains) == ["a.b", "a", "train", "forward", "items", "0"]
    assert len(net.state_dict()) == len(set(net.state_dict()))
    net.remove_domain("a")
    assert "a" not in net.domains
    assert "a.b" in net.domains


def test_a_copied_network_stands_alone():
    net = zoo.network("convnet with norms", kinds=("residual",))
    x = torch.randn(2, 3, 16, 16)
    before = net(x, domain="residual").detach()
    other = copy.deepcopy(net)
    assert torch.equal(other(x, domain="residual"), before)
    one_step(other, "residual", x)
    assert not torch.equal(other(x, domain="residual"), before)
    assert torch.equal(net(x, domain="residual"), before)


@torch.no_grad()
def test_a_network_without_domains_shares_the_backbone_and_nothing_else(tmp_path):
    net = zoo.network("convnet with norms", kinds=("residual", "conv"))
    x = torch.randn(2, 3, 16, 16)
    before, folder = net(x, domain="residual"), net.save_domain("residual", tmp_path)
    other = net.without_domains()
    assert other.backbone is net.backbone
    assert len(other.domains) == len(other.bases) == 0
    domain = other.load_domain(folder, name="loaded").eval()
    assert list(net.domains) == ["residual", "conv"]
    assert torch.equal(other(x, domain="loaded"), before)
    with pytest.raises(cn.CovNormError, match="unknown domain"):
        other(x, domain="conv")
    net.domains["loaded"] = domain
    assert torch.equal(net(x, domain="loaded"), before)
    assert list(net.without_domains({"shared": nn.Identity()}).bases) == ["shared"]


@pytest.mark.parametrize("fails", [True, False])
@torch.no_grad()
def test_an_error_restores_domains_and_bases(fails):
    net = zoo.network("mlp", kinds=())
    x = zoo.ZOO["mlp"][1](20)
    for name in "abc":
        zoo.shake_(net.add_domain(name, 3))
    net.eval()
    cn.join_(net, "a", {"a": cn.collect(net, "a", [x])})
    answers, basis = {n: net(x, domain=n) for n in "abc"}, net.basis("joint")
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        with net.restoring_on_error(["b"]):
            cn.join_(net, "b", {"b": cn.collect(net, "b", [2 * x])})  # changes a's maps too
            net.domain("b").head.weight.zero_()
            net.add_domain("new", 2)
            net.remove_domain("c")
            cn.join_svd_(net, ["new"], 2)
            assert not torch.equal(net(x, domain="a"), answers["a"])
            if fails:
                raise KeyboardInterrupt
    assert list(net.domains) == (["a", "b", "c"] if fails else ["a", "b", "new"])
    assert list(net.bases) == (["joint"] if fails else ["joint", "joint-svd"])
    assert (net.basis("joint") is basis) == fails
    assert torch.equal(net(x, domain="b"), answers["b"]) == fails
    if fails:
        assert all(torch.equal(net(x, domain=n), answers[n]) for n in "abc")
        assert net.domain("b").basis is None


# ── bad input ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", ["", "A", "../up", "-a", "a b", "a/b", "é", "x" * 65, None, 3, "a\n"]
)
def test_names_outside_the_pattern_are_refused(name):
    net = zoo.network("mlp", kinds=())
    with pytest.raises(cn.CovNormError, match="domain name"):
        net.add_domain(name, 2)
    assert len(net.domains) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "classes"),
        ({"classes": ["a", "a"]}, "classes"),
        ({}, "give classes="),
        ({"classes": 2, "adapter": "residul"}, "did you mean 'residual'"),
        ({"classes": 2, "adapter": "lowrank", "rank": 0}, "rank=0"),
        ({"classes": 2, "rank": 1.5}, "rank=1.5"),
        ({"classes": 2, "adapter": "conv", "rank": 3}, "rank=3"),
    ],
)
def test_a_failed_add_leaves_the_network_as_it_was(arguments, message):
    net = zoo.network("mlp")
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(cn.CovNormError, match=message):
        net.add_domain("new", **arguments)
    assert list(net.domains) == list(zoo.KINDS)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_a_duplicate_domain_is_refused():
    with pytest.raises(cn.CovNormError, match="already exists"):
        zoo.network("mlp").add_domain("conv", 2)


def test_a_backbone_without_sites_is_refused():
    with pytest.raises(cn.CovNormError, match="no site found in ReLU"):
        cn.MultiDomainNetwork(nn.ReLU())
    with pytest.raises(cn.CovNormError, match="no site found"):
        cn.MultiDomainNetwork(zoo.mlp(), sites=lambda *_: False)


def test_a_backbone_in_two_networks_is_refused():
    backbone = zoo.mlp()
    cn.MultiDomainNetwork(backbone)
    with pytest.raises(cn.CovNormError, match="deepcopy"):
        cn.MultiDomainNetwork(backbone)


@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (3, 16, 16), (2, 1, 16, 16), (2, 3)])
@pytest.mark.parametrize("name", ["convnet", "efficientnet-lite0"])
def test_a_batch_of_the_wrong_rank_or_channels_is_refused(name, shape):
    net = zoo.network(name, kinds=("residual",))
    with pytest.raises(cn.CovNormError, match=r"\(n, 3, h, w\)"):
        net(torch.randn(shape), domain="residual")


@pytest.mark.parametrize("domains", [["conv"], ["conv"] * 3, []])
def test_a_domain_list_of_the_wrong_length_is_refused(domains):
    with pytest.raises(cn.CovNormError, match="one per sample"):
        zoo.network("mlp")(torch.randn(2, 12), domain=domains)


def test_a_mixed_batch_in_training_mode_says_why_it_cannot_be():
    net = zoo.network("mlp").train()
    with pytest.raises(cn.CovNormError, match="batch statistics would mix"):
        net(torch.randn(2, 12), domain=["conv", "residual"])
    assert net(torch.randn(2, 12), domain=["conv", "conv"]).shape == (2, 5)
