"""A prepared domain gives the same outputs, in every batch."""

from __future__ import annotations

import pytest
import torch
import zoo

import torch_covnorm as cn

pytestmark = pytest.mark.filterwarnings("ignore::torch_covnorm.CovNormWarning")  # sites everywhere
KINDS = ("residual", "parallel", "conv", "batchnorm", "lowrank", "none")


def network(name, kinds, norms=zoo.NORMS["mixed"]):
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(zoo.ZOO[name][0](), sites=zoo.everywhere)
    for i, kind in enumerate(kinds):
        which = None if kind in zoo.TRAIN_NORMS else norms[i % len(norms)]
        zoo.shake_(net.add_domain(f"d{i}", 4, kind, norms=which))
    return net.eval(), zoo.ZOO[name][1](6)


@pytest.mark.parametrize("name", ["convnet", "mlp", "convnet with norms"])
@pytest.mark.parametrize("kinds", [KINDS[:1] * 3, KINDS[1:2] * 2, KINDS], ids=["rrr", "pp", "all"])
@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("norms", zoo.NORMS.values(), ids=zoo.NORMS)
@torch.no_grad()
def test_a_prepared_domain_answers_as_before_alone_and_in_any_batch(name, kinds, norms, only):
    net, x = network(name, kinds, norms)
    names = [f"d{i % len(kinds)}" for i in (2, 0, 1, 1, 3, 5)]
    before = {d: net(x, domain=d) for d in set(names)}
    mixed = net(x, domain=names)
    for d in sorted(set(names))[:-1]:  # not all of them: then none is used as prepared
        net.prepare_(d)
    torch.testing.assert_close(net(x, domain=names), mixed)
    net.prepare_(max(names))
    if only:
        for d in set(names):
            net.prepare_(d, only=True)
    torch.testing.assert_close(net(x, domain=names), mixed)
    for d, answer in before.items():
        torch.testing.assert_close(net(x, domain=d), answer)


def test_what_was_prepared_is_used_and_training_forgets_it():
    net, x = network("convnet", ["residual", "residual"])
    with torch.no_grad():
        before = net(x, domain=["d0", "d1"] * 3)
        net.prepare_("d0")
        net.prepare_("d1")
        next(iter(net.domain("d0").maps.values())).A.add_(1)
        assert torch.equal(net(x, domain=["d0", "d1"] * 3), before), "it is not computed again"
        net.train_domain("d0")
        net.eval()
        assert net.domain("d0").prepared is None
        assert not torch.equal(net(x, domain=["d0", "d1"] * 3), before)


def test_gradients_flow_past_what_was_prepared():
    net, x = network("convnet", ["residual"])
    net.prepare_("d0")
    net(x, domain="d0").sum().backward()
    assert all(p.grad is not None for p in net.parameters_of("d0"))


def test_its_bytes_are_those_of_its_tensors_each_once():
    net, _ = network("convnet with norms", ["residual"])
    domain = net.domain("d0")
    state = sum(t.numel() * t.element_size() for t in domain.state_dict().values())
    assert domain.bytes == state
    net.prepare_("d0")
    norms = sum(n.weight.numel() for _, n in domain.norms.items())
    forms = sum(
        4 * (A.numel() + 2 * len(A)) for A in (A.matrix() for A in domain.maps.values())
    )  # A, gain and shift
    assert domain.bytes == state + 8 * norms + forms


@pytest.mark.parametrize("method", ["own", "mask"])
@torch.no_grad()
def test_weights_of_its_own_stay_with_a_domain_that_only_answers(method):
    net, x = network("convnet with norms", ["residual", method])
    mixed = net(x, domain=["d0", "d1"] * 3)
    for name in ("d0", "d1"):
        net.prepare_(name, only=True)
    torch.testing.assert_close(net(x, domain=["d0", "d1"] * 3), mixed)


def test_gradients_through_weights_of_its_own_are_refused_too():
    net, x = network("convnet with norms", ["own"])
    net.prepare_("d0", only=True)
    with pytest.raises(cn.CovNormError, match="Reload it"):
        net(x, domain="d0")


@pytest.mark.parametrize("only", [False, True])
@torch.no_grad()
def test_what_was_prepared_moves_with_the_network(only):
    net, x = network("convnet with norms", ["residual", "residual", "parallel"])
    cn.join_(net, ["d0", "d1"], {d: cn.collect(net, d, [x]) for d in ("d0", "d1")}, 0.999)
    names = ["d0", "d2"] * 3
    before = net(x, domain=names)
    for name in ("d0", "d2"):
        net.prepare_(name, only=only)
    after = net.double()(x.double(), domain=names)
    assert after.dtype is torch.float64
    torch.testing.assert_close(after.float(), before, atol=1e-5, rtol=1e-4)


def test_a_domain_that_only_answers_is_smaller_and_refuses_all_else(tmp_path):
    net, x = network("convnet with norms", ["residual", "residual"])
    net.prepare_("d0")
    before = net.domain("d0").bytes
    net.prepare_("d0", only=True)
    assert net.domain("d0").bytes < 0.6 * before
    refused = pytest.raises(cn.CovNormError, match=r"'d0'.*Reload it")
    for ask in (
        lambda: net.save_domain("d0", tmp_path),
        lambda: net.merge("d0"),
        lambda: net.num_parameters("d0"),
        lambda: cn.account(net, "d0"),
        lambda: cn.collect(net, "d0", [x]),
        lambda: net(x, domain="d0"),  # with gradients
        lambda: net(x, domain=["d0", "d1"] * 3),  # the other is not prepared
        lambda: net.prepare_("d0"),
    ):
        with refused:
            ask()
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        assert net(x, domain="d0").isfinite().all()
    net.train_domain("d0")
    with refused:
        net(x, domain="d0")


@torch.no_grad()
def test_what_domains_share_is_in_memory_once():
    net, x = network("convnet with norms", ["residual", "residual", "residual"])
    shared = ["d0", "d1"]
    cn.join_(net, shared, {d: cn.collect(net, d, [x]) for d in shared}, 0.999)
    names = ["d0", "d2", "d1", "d1", "d0", "d2"]
    mixed, alone = net(x, domain=names), net(x, domain="d1")
    held = {t.data_ptr() for t in net.bases[net.domain("d0").basis].state_dict().values()}
    for name in set(names):
        net.prepare_(name, only=True)
    torch.testing.assert_close(net(x, domain=names), mixed)
    torch.testing.assert_close(net(x, domain="d1"), alone)
    for name in shared:
        factors = [f for a in net.domain(name).prepared.kept.values() for f in a.A.factors]
        assert held & {f.data_ptr() for f in factors}
        assert not held & {t.data_ptr() for t in net.domain(name).prepared.tensors}
