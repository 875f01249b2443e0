"""Copies of a network: deepcopy, pickling, and the state dict of a whole network."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
import zoo
from torch import nn

import torch_covnorm as cn

NAME = "convnet with norms"
IMAGES = zoo.ZOO[NAME][1]


@pytest.fixture(scope="module")
def net():
    """One domain of every kind; tests must not change it."""
    return zoo.network(NAME, norms=("own",))


def bits(module: nn.Module) -> dict[str, bytes]:
    return {k: v.numpy().tobytes() for k, v in module.state_dict().items()}


def train(net, name, x, y):
    optimizer = torch.optim.SGD(net.parameters_of(name), lr=0.1)
    net.train_domain(name)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x, domain=name), y).backward()
        optimizer.step()
    net.eval()


# ── deepcopy ─────────────────────────────────────────────────────────────────────────────────


def test_a_deepcopy_gives_the_same_answers(net):
    twin, x = copy.deepcopy(net), IMAGES(len(zoo.KINDS))
    with torch.no_grad():
        for kind in zoo.KINDS:
            assert torch.equal(twin(x, domain=kind), net(x, domain=kind)), kind
        mixed, expected = (n(x, domain=list(zoo.KINDS)) for n in (twin, net))
    assert all(torch.equal(a, b) for a, b in zip(mixed, expected, strict=True))


def test_a_deepcopy_shares_no_module_and_no_tensor(net):
    twin = copy.deepcopy(net)
    for a, b in zip(net.modules(), twin.modules(), strict=True):
        assert a is not b
        assert type(a) is type(b)
    ours = {t.data_ptr() for t in net.state_dict().values() if t.numel()}
    assert not ours & {t.data_ptr() for t in twin.state_dict().values() if t.numel()}


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_training_a_deepcopy_or_its_original_leaves_the_other_as_it_was(kind):
    net = zoo.network(NAME)
    x, y = IMAGES(8), torch.arange(8) % 3
    twin = copy.deepcopy(net)
    before = bits(net)
    train(twin, kind, x, y)
    assert bits(net) == before
    assert bits(twin.domain(kind)) != bits(net.domain(kind))
    before = bits(twin)
    train(net, kind, x, y)
    assert bits(twin) == before
    assert bits(twin.domain(kind)) == bits(net.domain(kind)), "both were trained alike"


def test_hooks_of_a_deepcopy_see_only_its_own_calls(net):
    twin, x = copy.deepcopy(net), IMAGES(2)
    seen = []
    hook = twin.backbone.stem[0].register_forward_hook(lambda *_: seen.append("twin"))
    net(x, domain="residual")
    assert seen == []
    twin(x, domain="residual")
    assert seen == ["twin"]
    hook.remove()


def test_a_deepcopy_with_a_basis_refers_to_the_basis_of_the_copy():
    net = zoo.network(NAME, ("residual", "parallel"))
    net.copy_domain("residual", "other")
    loader = [(IMAGES(16), torch.arange(16) % 3)]
    names = ["residual", "other"]
    cn.join_(net, names, {n: cn.collect(net, n, loader) for n in names}, variance=0.9)
    twin, x = copy.deepcopy(net), IMAGES(4)
    before = net(x, domain="other").detach()
    assert torch.equal(twin(x, domain="other"), before)
    for factors in next(iter(twin.bases.values())).factors.values():
        factors.W.mul_(2)
    assert torch.equal(net(x, domain="other"), before)
    assert not torch.equal(twin(x, domain="other"), before)


def test_a_domain_added_to_a_deepcopy_is_routed_there(net):
    twin, x = copy.deepcopy(net), IMAGES(4)
    twin.add_domain("new", classes=6)
    assert twin(x, domain="new").shape == (4, 6)
    assert "new" not in net.domains


# ── pickling ─────────────────────────────────────────────────────────────────────────────────

REMEDY = r"cannot be pickled.*save_domain.*state_dict"


def test_a_network_and_its_backbone_refuse_to_be_pickled_with_the_remedy(net):
    for part in (net, net.backbone, net.backbone.stem, net.without_domains()):
        with pytest.raises(cn.CovNormError, match=REMEDY):
            torch.save(part, io.BytesIO())
        with pytest.raises(cn.CovNormError, match=REMEDY):
            pickle.dumps(part)


def test_a_backbone_of_a_local_class_does_not_hide_the_remedy():
    class Local(nn.Sequential):
        pass

    net = cn.MultiDomainNetwork(Local(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)))
    with pytest.raises(cn.CovNormError, match=REMEDY):
        pickle.dumps(net)


def test_a_spawned_process_refuses_the_network_before_it_starts(net):
    process = multiprocessing.get_context("spawn").Process(target=print, args=(net,))
    with pytest.raises(cn.CovNormError, match=REMEDY):
        process.start()


def test_what_the_remedy_names_can_be_pickled(net):
    x, file = IMAGES(3), io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == net.state_dict().keys()
    plain = pickle.loads(pickle.dumps(net.merge("residual")))
    assert zoo.close(plain(x), net(x, domain="residual"))


# ── state dicts ──────────────────────────────────────────────────────────────────────────────


def fresh(kinds=zoo.KINDS):
    torch.manual_seed(1)
    net = cn.MultiDomainNetwork(zoo.ZOO[NAME][0](), sites=zoo.everywhere)
    for i, kind in enumerate(kinds):
        net.add_domain(kind, classes=3 + i % 3, adapter=kind, norms="own")
    return net.eval()


def test_a_state_loads_into_a_fresh_network_with_the_same_domains(net):
    new, x = fresh(), IMAGES(4)
    assert not torch.equal(new(x, domain="residual"), net(x, domain="residual"))
    new.load_state_dict(net.state_dict())
    assert new.fingerprint == net.fingerprint
    for kind in zoo.KINDS:
        assert torch.equal(new(x, domain=kind), net(x, domain=kind))


def test_a_state_with_other_domains_says_which_to_add_or_remove(net):
    new = fresh(("residual",))
    before = bits(new)
    with pytest.raises(cn.CovNormError, match="lacks: batchnorm, conv") as error:
        new.load_state_dict(net.state_dict())
    assert "net.add_domain('parallel', classes=4)" in str(error.value)
    new.add_domain("extra.1", classes=2)
    with pytest.raises(cn.CovNormError, match=r"nothing for the domains extra\.1"):
        new.load_state_dict(fresh(("residual",)).state_dict())
    new.remove_domain("extra.1")
    assert bits(new) == before, "nothing was loaded"
    new.load_state_dict(net.state_dict(), strict=False)
    assert bits(new.domain("residual")) == bits(net.domain("residual"))


def test_a_state_whose_domain_has_other_parts_names_them():
    net, x = fresh(("residual",)), IMAGES(16)
    moments = cn.collect(net, "residual", [(x, torch.arange(16) % 3)])
    cn.normalize_(net, "residual", moments, variance=0.9)
    new = fresh(("residual",))
    before = bits(new)
    with pytest.raises(cn.CovNormError, match=r"domain 'residual': adapters\.\S+\.A\.\w+ is"):
        new.load_state_dict(net.state_dict())
    assert bits(new) == before, "nothing was loaded"
    new.remove_domain("residual")
    new.add_domain("residual", classes=7)
    with pytest.raises(cn.CovNormError, match=r"head\.bias is \(3,\) .* \(7,\)"):
        new.load_state_dict(fresh(("residual",)).state_dict())


def test_a_state_with_a_basis_says_to_load_it():
    net = fresh(("residual",))
    moments = cn.collect(net, "residual", [(IMAGES(16), torch.arange(16) % 3)])
    cn.join_(net, ["residual"], {"residual": moments}, variance=0.9)
    with pytest.raises(cn.CovNormError, match="load_basis"):
        fresh(("residual",)).load_state_dict(net.state_dict())
