"""Which norms of the backbone a domain copies: none, those after its sites, or all."""

from __future__ import annotations

import json

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn
from torch_covnorm.network.sites import NORMS

EVERY = ("stem.1", "strided.1", "dilated.1", "grouped.1", "valid.1", "reflected.1")
COPIED = {"shared": (), "sites": ("strided.1", "valid.1"), "own": EVERY}
SITES = ("strided.0", "valid.0")


def bare():
    """A network with six norms and adapters before two of them, its statistics not the initial."""
    torch.manual_seed(0)
    backbone = zoo.TinyConvNet(norms=True)
    zoo.shake_(backbone, 0.3)
    return cn.MultiDomainNetwork(backbone, sites=lambda name, _: name in SITES).eval()


def network(kind="residual"):
    net = bare()
    for norms in NORMS:
        zoo.shake_(net.add_domain(norms, 4, kind, norms=norms), 0.3)
    return net.eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(6, 3, 16, 16)


@pytest.mark.parametrize("norms", NORMS)
def test_a_domain_copies_these_norms_and_trains_no_others(norms, x):
    net = network()
    assert tuple(net.domain(norms).norms) == COPIED[norms]
    bits = zoo.backbone_bits(net)
    net.train()
    torch.optim.SGD(net.parameters_of(norms), lr=0.1).zero_grad()
    net(x, domain=norms).square().mean().backward()
    assert all(p.grad is not None for p in net.parameters_of(norms))
    assert all(p.grad is None for p in net.backbone.parameters())
    counted = [int(n.num_batches_tracked) for _, n in net.domain(norms).norms.items()]
    assert counted == [1] * len(COPIED[norms])
    assert zoo.backbone_bits(net) == bits, "shared norms stay in eval mode"


def test_the_default_is_shared_except_for_adapters_that_train_norms_or_weights():
    net = bare()
    for kind in (*zoo.KINDS, "none"):
        net.add_domain(kind, 2, kind)
        own = kind in zoo.TRAIN_NORMS
        assert tuple(net.domain(kind).norms) == (COPIED["own"] if own else ())


def test_what_is_not_an_option_is_refused():
    net = bare()
    with pytest.raises(cn.CovNormError, match="norms='share': did you mean 'shared'"):
        net.add_domain("a", 2, norms="share")
    with pytest.raises(cn.CovNormError, match="choose norms='own' or 'sites'"):
        net.add_domain("a", 2, "batchnorm", norms="shared")
    assert not list(net.domains)


@pytest.mark.parametrize("kind", ["residual", "parallel", "conv", "lowrank"])
@pytest.mark.parametrize("prepared", [(), ("shared", "own"), NORMS], ids=["none", "two", "all"])
@pytest.mark.parametrize("only", [False, True])
@torch.no_grad()
def test_a_batch_of_domains_of_the_three_kinds_is_its_samples_run_alone(kind, prepared, only, x):
    net, names = network(kind), ["own", "shared", "sites", "shared", "own", "sites"]
    alone = torch.cat([net(x[i : i + 1], domain=n) for i, n in enumerate(names)])
    for name in prepared:
        net.prepare_(name, only=only and prepared == NORMS)
    for order in (range(6), (5, 3, 1, 0, 2, 4), (1, 3), (2, 1), (0, 0, 2)):
        mixed = net(x[list(order)], domain=[names[i] for i in order])
        assert zoo.close(mixed, alone[list(order)], 1e-5)
    wrong = net(x, domain=["own", "own", "sites", "shared", "own", "sites"])  # the second is wrong
    close = [zoo.close(a, b, 1e-3) for a, b in zip(wrong, alone, strict=True)]
    assert close == [True, False, True, True, True, True]
    for name in NORMS:
        rows = [i for i, n in enumerate(names) if n == name]
        assert zoo.close(net(x, domain=name)[rows], alone[rows], 1e-5)


@pytest.mark.parametrize("norms", NORMS)
@torch.no_grad()
def test_the_backbones_numbers_are_used_where_a_norm_is_shared(norms, x):
    net = network()
    before = net(x, domain=norms)
    for name in EVERY:
        norm = net.backbone.get_submodule(name)
        kept = norm.running_mean.clone()
        norm.running_mean.add_(1)
        same = torch.equal(net(x, domain=norms), before)
        assert same == (name in COPIED[norms])
        norm.running_mean.copy_(kept)
    assert torch.equal(net(x, domain=norms), before)


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("absorbed", [False, True])
@torch.no_grad()
def test_a_merged_network_equals_it(norms, absorbed, x):
    net = network()
    if absorbed:
        cn.normalize_(net, norms, cn.collect(net, norms, [x]), variance=0.9)
        cn.absorb_(net, norms)
    assert zoo.close(net.merge(norms)(x), net(x, domain=norms), 1e-5)
    other = NORMS[NORMS.index(norms) - 1]
    assert not zoo.close(net.merge(other)(x), net(x, domain=norms), 1e-3), "a control"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@torch.no_grad()
def test_files_say_which_norms_and_bring_them_back(dtype, x, tmp_path):
    net, sizes = network(), {}
    for norms in NORMS:
        folder = net.save_domain(norms, tmp_path / norms, dtype)
        record = json.loads((folder / "domain.json").read_text())
        assert record["norms"] == norms
        sizes[norms] = sum(f.stat().st_size for f in folder.iterdir())
        other = bare()
        other.load_domain(folder)
        assert tuple(other.domain(norms).norms) == COPIED[norms]
        if dtype is torch.float32:
            assert torch.equal(other.eval()(x, domain=norms), net(x, domain=norms))
        again = other.save_domain(norms, tmp_path / "again", dtype)
        files = [{f.name: f.read_bytes() for f in d.iterdir()} for d in (folder, again)]
        assert files[0] == files[1]
    assert sizes["shared"] < sizes["sites"] < sizes["own"]


@torch.no_grad()
def test_a_file_without_the_key_is_of_the_first_version_with_all_norms(x, tmp_path):
    import domain_files

    net = network()
    folder = net.save_domain("own", tmp_path / "own")
    domain_files.forge(folder, record=lambda r: r.pop("norms"))
    other = bare()
    other.load_domain(folder)
    assert torch.equal(other.eval()(x, domain="own"), net(x, domain="own"))


@pytest.mark.parametrize(("said", "stored"), [("shared", "own"), ("own", "shared"), ("all", "own")])
def test_a_file_whose_norms_are_others_than_it_says_is_refused(said, stored, tmp_path):
    import domain_files

    folder = network().save_domain(stored, tmp_path / "d")
    domain_files.forge(folder, record=lambda r: r.update(norms=said))
    net = bare()
    with pytest.raises(cn.CovNormError):
        net.load_domain(folder)
    assert not list(net.domains)


def test_parameters_are_counted_without_what_is_shared():
    net = network()
    affine = {n: 2 * net.backbone.get_submodule(n).num_features for n in EVERY}
    B1 = sum(2 * site.d_out for site in net.sites.values())
    for norms in NORMS:
        expected = B1 + sum(affine[n] for n in COPIED[norms])
        assert net.num_parameters(norms)["norm"] == expected


@torch.no_grad()
def test_norms_with_an_activation_inside_are_shared_and_mixed_too(x):
    """As timm's: a subclass of BatchNorm2d that also computes a ReLU."""

    class NormAct(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 6, 3), NormAct(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )
    zoo.shake_(backbone, 0.3)
    net = cn.MultiDomainNetwork(backbone).eval()
    for norms in ("shared", "own"):
        zoo.shake_(net.add_domain(norms, 3, norms=norms), 0.3)
    net.eval()
    names = ["shared", "own"] * 3
    alone = torch.cat([net(x[i : i + 1], domain=n) for i, n in enumerate(names)])
    assert zoo.close(net(x, domain=names), alone, 1e-5)
    assert zoo.close(net.merge("shared")(x), net(x, domain="shared"), 1e-5)
