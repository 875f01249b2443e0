"""What domains share: the basis of joint SVD and of joint CovNorm, in a network and in files."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from two_domains import assert_refused, network

import torch_covnorm as cn
from torch_covnorm.compress.geometric import joint_svd

pytestmark = pytest.mark.filterwarnings("ignore::torch_covnorm.CovNormWarning")  # sites everywhere


@pytest.mark.parametrize("name", zoo.SMALL)
@pytest.mark.parametrize("kind", ["residual", "parallel", "conv"])
@pytest.mark.parametrize("rank", [2, 0.5, 1000])
@torch.no_grad()
def test_joint_svd_shares_one_frozen_W_and_gives_each_domain_its_C(name, kind, rank):
    net, x = network(name, kind)
    maps = {n: {s: a.A for s, a in net.domains[n].adapters.items()} for n in "ab"}
    answers = {n: net(x, domain=n) for n in "ab"}
    basis = cn.join_svd_(net, ["a", "b"], rank)
    assert basis is net.basis("joint-svd")
    for site, shared in basis.factors.items():
        d_out, d_in = maps["a"][site].matrix().shape
        r = min(2 * d_out, d_in, round(rank * d_out) if rank == 0.5 else rank)
        C, W = joint_svd([maps[n][site].matrix() for n in "ab"], r)
        assert (shared.W.shape, shared.C) == ((r, d_in), None)
        assert not list(basis.parameters())
        for domain, C_i in zip("ab", C, strict=True):
            new = net.domains[domain].adapters[site].A
            assert new.shared is shared
            assert zoo.close(new.M @ shared.W, (C_i @ W).float(), 1e-5)
            assert torch.equal(new.offset, maps[domain][site].bias)
            assert set(new.trains) == {"M", "bias"}
            assert new.paper_count() == d_out * r
    full = rank == 1000
    assert all(zoo.close(net(x, domain=n), answers[n], 1e-4) == full for n in "ab")


def shared(kind, M="closed-form", seed=0):
    """Domains a and b on a basis, a batch, and the name of the basis."""
    net, x = network(seed=seed)
    if kind == "svd":
        return net, x, cn.join_svd_(net, ["a", "b"], 3).name
    moments = {n: cn.collect(net, n, [x]) for n in "ab"}
    return net, x, cn.join_(net, ["a", "b"], moments, 0.8, M=M).basis


BASES = pytest.mark.parametrize(
    ("kind", "M"), [("svd", ""), ("cov", "closed-form"), ("cov", "none")]
)


@BASES
@torch.no_grad()
def test_mixed_batches_absorbed_and_merged_domains_equal_joint_ones(kind, M):
    net, x, basis = shared(kind, M)
    answers = {n: net(x, domain=n) for n in "ab"}
    rows = list(zip(net(x, domain=list("abbaab")), "abbaab", range(6), strict=True))
    assert all(zoo.close(row, answers[n][i], 1e-5) for row, n, i in rows)
    assert not zoo.close(rows[0][0], answers["b"][0], 1e-2)  # control: the wrong domain
    for users in (["a", "b"], ["b"]):
        with pytest.raises(cn.CovNormError, match=f"is used by {', '.join(users)}: remove them"):
            net.remove_basis(basis)
        cn.absorb_(net, users[0])  # leaves the basis
        assert net.domains[users[0]].basis is None
    net.remove_basis(basis)
    assert all(zoo.close(net(x, domain=n), answers[n], 1e-5) for n in "ab")
    assert_refused(net, "unknown basis", basis, do=cn.MultiDomainNetwork.basis)
    net = shared(kind, M)[0]
    assert all(zoo.close(net.merge(n)(x), answers[n]) for n in "ab")


@BASES
@torch.no_grad()
def test_a_copy_of_the_network_shares_inside_itself_alone(kind, M):
    net, x, basis = shared(kind, M)
    answers, copied = {n: net(x, domain=n) for n in "ab"}, copy.deepcopy(net)
    for site, factors in copied.basis(basis).factors.items():
        assert all(copied.domains[n].adapters[site].A.shared is factors for n in "ab")
        assert factors.W.data_ptr() != net.basis(basis).factors[site].W.data_ptr()
    assert all(torch.equal(copied(x, domain=n), answers[n]) for n in "ab")
    copied.basis(basis).factors["stem.0"].W.zero_()
    assert not torch.equal(copied(x, domain="a"), answers["a"])
    assert all(torch.equal(net(x, domain=n), answers[n]) for n in "ab")
    twin = net.copy_domain("a", "twin")  # inside one network: the same tensors
    assert twin.adapters["stem.0"].A.shared is net.basis(basis).factors["stem.0"]


@BASES
@torch.no_grad()
def test_basis_and_domains_come_back_in_another_network_to_the_bit(kind, M, tmp_path):
    net, x, basis = shared(kind, M)
    folder, domain = net.save_basis(basis, tmp_path / "basis"), net.save_domain("a", tmp_path / "a")
    other = network()[0]
    other.remove_domain("a")
    assert_refused(
        other, "domain.json.*call net.load_basis first", domain, do=type(net).load_domain
    )
    loaded = other.load_basis(folder)
    other.load_domain(domain)
    old = net.basis(basis)
    assert (loaded.fingerprint, loaded.settings) == (old.fingerprint, old.settings)
    assert [*loaded.x, *loaded.y] == [*old.x, *old.y]
    for site, m in [*loaded.x.items(), *loaded.y.items()]:
        was = (old.x if m is loaded.x[site] else old.y)[site].state_dict()
        assert all(torch.equal(v, was[k]) for k, v in m.state_dict().items())
    states = other.domain("a").state_dict(), net.domain("a").state_dict()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0] | states[1])
    assert other.domain("a").basis == basis
    assert torch.equal(other(x, domain="a"), net(x, domain="a"))
    assert_refused(other, f"basis '{basis}' already exists", folder, do=type(net).load_basis)


def test_basis_and_domain_in_one_folder_leave_each_other_alone(tmp_path):
    net, _, basis = shared("cov")
    for _ in range(2):  # the second time over existing files
        net.save_domain("a", tmp_path)
        net.save_basis(basis, tmp_path)
        with torch.no_grad():
            net.domain("a").head.weight.add_(1)
    other = network()[0]
    other.remove_domain("a")
    other.load_basis(tmp_path)
    other.load_domain(tmp_path)
    assert len(list(tmp_path.glob("tensors-*"))) == 2  # nothing is left of the first time


def test_another_basis_of_the_same_name_or_backbone_is_refused(tmp_path):
    net, x, basis = shared("cov")
    other = network()[0]
    other.remove_domain("a")
    cn.join_(other, "b", {"b": cn.collect(other, "b", [2 * x])}, basis=basis)
    folder = net.save_domain("a", tmp_path / "a")
    assert_refused(
        other,
        "shares the basis 'joint'.*another version of it.*new network",
        folder,
        do=type(net).load_domain,
    )
    other, folder = network(seed=1)[0], net.save_basis(basis, tmp_path / "basis")
    assert_refused(other, "basis.json.*another backbone", folder, do=type(net).load_basis)


@pytest.mark.parametrize("kind", ["svd", "cov"])
def test_a_damaged_basis_is_refused_by_name(kind, tmp_path):
    net, _, basis = shared(kind)
    folder, other = net.save_basis(basis, tmp_path), network()[0]
    for file in list(folder.iterdir()):
        whole = file.read_bytes()
        damaged = [b"", whole[: len(whole) // 2], whole[:-1], None]
        for i in range(0, len(whole), len(whole) // 25):
            damaged.append(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        for blob in damaged:
            file.unlink(missing_ok=True)
            if blob is not None:
                file.write_bytes(blob)
            with pytest.raises(cn.CovNormError, match=file.name) as error:
                other.load_basis(folder)
            json = file.suffix == ".json"  # a flipped bit there may give another format or version
            assert json or blob is None or "restore it from a copy" in str(error.value)
        file.write_bytes(whole)
    assert len(other.bases) == 0
    assert other.load_basis(folder).name == basis  # whole again


@pytest.mark.parametrize("change", ["half", "load_state_dict"])
def test_a_basis_whose_numbers_changed_since_is_saved_so_that_it_loads(change, tmp_path):
    net, _, basis = shared("svd")
    if change == "half":
        net.half()
    else:
        state = {k: 2 * v if k.startswith("bases.") else v for k, v in net.state_dict().items()}
        net.load_state_dict(state)
    folder, W = net.save_basis(basis, tmp_path), net.basis(basis).factors["stem.0"].W
    del net.domains["a"], net.domains["b"], net.bases[basis]
    assert torch.equal(net.load_basis(folder).factors["stem.0"].W, W)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a", "x"],), "unknown domain 'x'"),
        (([],), "each once"),
        ((["a", "a"],), "each once"),
        ((["a", "norms"],), "'norms' has no matrix A"),
        ((["a", "beside"],), "different kinds"),
        ((["a", "thin"],), "'thin': site '0' is already compressed"),
        ((["a", "b"], 0), "rank=0"),
        ((["a", "b"], 2, "taken"), "basis 'taken' already exists"),
        ((["a", "b"], 2, "Not a name"), "Not a name"),
    ],
)
def test_what_cannot_share_a_joint_svd_is_refused_and_stays_as_it_was(arguments, message):
    net, _ = network("mlp")
    for name, kind in (("c", "residual"), ("norms", "batchnorm"), ("beside", "parallel")):
        net.add_domain(name, 3, kind)
    net.add_domain("thin", 3, "residual", rank=2)
    cn.join_svd_(net, ["c"], 2, "taken")
    assert_refused(net, message, *arguments, do=cn.join_svd_)
    assert list(net.bases) == ["taken"]
    assert net.domains["a"].basis is None
