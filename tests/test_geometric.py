"""Truncated SVD of A, alone and joint; and what shares a basis, that of joint CovNorm as well."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo

import torch_covnorm as cn
from torch_covnorm.adapters import LowRankMap
from torch_covnorm.geometric import joint_svd, svd

pytestmark = pytest.mark.filterwarnings("ignore::torch_covnorm.CovNormWarning")  # sites everywhere
SHAPES = [(8, 8), (5, 9), (9, 5), (6, 1), (1, 6), (1, 1)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def error(A, C, W):
    """||A - C W||_F²."""
    return (A - C @ W).square().sum()


def smallest_kept(A, r):
    """A broken truncation, for the controls: the directions of the smallest singular values."""
    U, S, V = torch.linalg.svd(A, full_matrices=False)
    return U[:, -r:] * S[-r:].sqrt(), S[-r:].sqrt()[:, None] * V[-r:]


# ── svd ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("d_out", "d_in"), SHAPES)
def test_the_truncation_is_the_one_of_Eckart_and_Young(d_out, d_in):
    A = random(d_out, d_in)
    U, S, V = torch.linalg.svd(A, full_matrices=False)
    for r in range(1, len(S) + 1):
        C, W = svd(A, r)
        assert (C.shape, W.shape) == ((d_out, r), (r, d_in))
        close(C @ W, U[:, :r] @ S[:r].diag() @ V[:r])
        close(error(A, C, W), S[r:].square().sum())
    assert svd(A.float(), 1)[0].dtype == svd(A.float(), 1)[1].dtype == torch.float64
    if len(S) > 1:  # control
        assert error(A, *smallest_kept(A, 1)) > 1.1 * error(A, *svd(A, 1))


@pytest.mark.parametrize("r", [1, 3, 6])
def test_no_other_matrix_of_that_rank_is_nearer(r):
    """Alternating least squares from random starts, each step the best C for W or W for C."""
    A = random(8, 7)
    least = error(A, *svd(A, r))
    for seed in range(5):
        W = random(r, 7, seed=seed)
        for _ in range(300):
            C = A @ torch.linalg.pinv(W)
            W = torch.linalg.pinv(C) @ A
        assert error(A, C, W) >= least * (1 - 1e-9)
        assert error(A, random(8, r, seed=seed), random(r, 7, seed=seed)) > least
    assert error(A, *smallest_kept(A, r)) > least  # control: the search would find better


def test_C_and_W_carry_the_same_weight():
    """Columns of C and rows of W are orthogonal, each pair √s long: neither side is tuned more."""
    A = random(8, 6)
    C, W = svd(A, 4)
    s = torch.linalg.svdvals(A)[:4].diag()
    close(C.T @ C, s)
    close(W @ W.T, s)


# ── joint_svd ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("d_out", "d_in"), SHAPES)
def test_joint_svd_is_the_svd_of_the_stacked_matrices(d_out, d_in):
    matrices = [random(d_out, d_in, seed=s) for s in range(3)]
    stacked = torch.cat(matrices)
    U, S, V = torch.linalg.svd(stacked, full_matrices=False)
    for r in range(1, d_in + 1):
        C, W = joint_svd(matrices, r)
        k = min(r, len(S))
        assert [c.shape for c in C] == [(d_out, k)] * 3
        assert W.shape == (k, d_in)
        close(torch.cat(C) @ W, U[:, :r] @ S[:r].diag() @ V[:r])


def test_at_full_rank_joint_svd_reproduces_every_A_and_for_one_domain_it_is_svd():
    matrices = [random(8, 5, seed=s) for s in range(3)]
    C, W = joint_svd(matrices, 5)
    for A, C_i in zip(matrices, C, strict=True):
        close(C_i @ W, A)
    C, W = joint_svd(matrices, 4)  # control
    assert not torch.allclose(C[0] @ W, matrices[0])
    assert not torch.allclose(C[1] @ W, C[0] @ W)
    (C,), W = joint_svd(matrices[:1], 3)
    assert torch.equal(C, svd(matrices[0], 3)[0])
    assert torch.equal(W, svd(matrices[0], 3)[1])


def test_one_W_for_all_costs_accuracy_against_one_for_each():
    matrices = [random(8, 8, seed=s) for s in range(3)]
    C, W = joint_svd(matrices, 3)
    for A, C_i in zip(matrices, C, strict=True):
        assert error(A, C_i, W) > error(A, *svd(A, 3))
        close(C_i, A @ torch.linalg.pinv(W))  # though C_i is the best there is for that W


# ── svd_ over a network ─────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def network(name="convnet", kind="residual", seed=0):
    """Domains "a" and "b" on a backbone with large weights and A's, so that outputs show them."""
    torch.manual_seed(seed)
    backbone = zoo.ZOO[name][0]()
    for p in backbone.parameters():
        p.mul_(2)
    net = cn.MultiDomainNetwork(backbone, sites=zoo.everywhere)
    for domain in "ab":
        zoo.shake_(net.add_domain(domain, 4, kind))
        for _, adapter in net.domains[domain].adapters.items():
            for p in adapter.A.parameters():
                p.normal_(std=0.4)
    x = zoo.ZOO[name][1](6)
    return net.eval(), x + torch.randn(6, *x.shape[1:2], *(1 for _ in x.shape[2:]))


@pytest.mark.parametrize("name", zoo.SMALL)
@pytest.mark.parametrize("kind", ["residual", "parallel", "conv"])
@pytest.mark.parametrize("rank", [2, 0.5])
@torch.no_grad()
def test_every_A_of_a_domain_becomes_its_truncated_svd(name, kind, rank):
    net, x = network(name, kind)
    adapters = net.domains["a"].adapters
    before = {s: (a.A.matrix().clone(), a.A.bias.clone()) for s, a in adapters.items()}
    other, backbone = net(x, domain="b"), zoo.backbone_bits(net)
    ranks = cn.svd_(net, "a", rank)
    assert set(ranks) == set(net.sites)
    for site, (A, b) in before.items():
        d_out, d_in = A.shape
        r = min(d_out, d_in, 2 if rank == 2 else d_out // 2)
        U, S, V = torch.linalg.svd(A.double(), full_matrices=False)
        new = adapters[site].A
        assert isinstance(new, LowRankMap)
        assert new.spatial == net.sites[site].spatial
        assert ranks[site] == r
        assert new.paper_count() == r * (d_out + d_in)
        assert zoo.close(new.matrix(), (U[:, :r] @ S[:r].diag() @ V[:r]).float(), 1e-6)
        assert torch.equal(new.bias, b)
        assert set(new.trains) == {"W", "C", "bias"}
    assert net.num_parameters("a")["adapter"] == sum(
        ranks[s] * sum(A.shape) for s, (A, _) in before.items()
    )
    assert torch.equal(net(x, domain="b"), other)
    assert zoo.backbone_bits(net) == backbone


@pytest.mark.parametrize("name", zoo.SMALL)
@pytest.mark.parametrize("kind", ["residual", "parallel", "conv"])
@torch.no_grad()
def test_at_full_rank_the_outputs_stay_and_below_they_do_not(name, kind):
    net, x = network(name, kind)
    answer = net(x, domain="a")
    cn.svd_(net, "a", 1000)  # more than any site has
    assert zoo.close(net(x, domain="a"), answer, 1e-5)
    net, x = network(name, kind)  # control
    cn.svd_(net, "a", 1)
    assert not zoo.close(net(x, domain="a"), answer, 1e-3)


@pytest.mark.parametrize("i", [1, 2, 3, 4, 5, 6])
def test_a_share_of_d_is_the_papers_r(i):
    """r = d/2^i for every site of the net, and never 0; whatever the mode of the network."""
    net, _ = network()
    ranks = cn.svd_(net.train(i % 2 == 0), "a", 1 / 2**i)
    assert {m.training for m in net.domains["a"].adapters.modules()} == {i % 2 == 0}
    assert ranks == {s: max(1, round(site.d_out / 2**i)) for s, site in net.sites.items()}


# ── join_svd_, and the basis that it makes, beside the one of joint CovNorm ─────────────────────


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
    """a and b on a basis of this kind; its name."""
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
    assert_refused(other, "domain.json.*load_basis it first", domain, do=type(net).load_domain)
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
    assert_refused(other, f"basis '{basis}' exists already", folder, do=type(net).load_basis)


def test_another_basis_of_the_same_name_or_backbone_is_refused(tmp_path):
    net, x, basis = shared("cov")
    other = network()[0]
    other.remove_domain("a")
    cn.join_(other, "b", {"b": cn.collect(other, "b", [2 * x])}, basis=basis)
    folder = net.save_domain("a", tmp_path / "a")
    assert_refused(other, "shares the basis 'joint'.*load_basis", folder, do=type(net).load_domain)
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
            json = file.suffix == ".json"  # a flip there may say another format or version
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


def assert_refused(net, message, *arguments, do=cn.svd_):
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(cn.CovNormError, match=message):
        do(net, *arguments)
    assert net.state_dict().keys() == state.keys()
    for key, value in net.state_dict().items():
        assert torch.equal(value.nan_to_num(77), state[key].nan_to_num(77)), key


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.0, 1.5, -0.5, float("nan"), float("inf"), True])
def test_a_rank_that_is_none_is_refused_and_the_network_stays_as_it_was(rank):
    assert_refused(network("mlp", "residual")[0], f"rank={rank}", "a", rank)


def test_what_has_no_trained_full_A_is_refused_and_stays_as_it_was():
    net = zoo.network("mlp", kinds=("residual", "lowrank", "batchnorm", "own", "mask"))
    moments = cn.collect(net, "residual", [(torch.randn(20, 12), None)])
    for name in ("batchnorm", "own", "mask"):
        assert_refused(net, f"domain '{name}': it has no matrix A", name)
    assert_refused(net, "domain 'lowrank': site '0' has been compressed already", "lowrank")
    assert_refused(net, "unknown domain 'residul': did you mean 'residual'", "residul")
    cn.normalize_(net, "residual", moments, variance=0.9)
    assert_refused(net, "domain 'residual': site '0' has been compressed already", "residual")
    cn.absorb_(net, "residual")
    assert_refused(net, "compressed already.*method='ra'", "residual")
    net, x = network("mlp")
    cn.svd_(net, "a", 2)
    assert_refused(net, "site '0' has been compressed already", "a", 1)
    cn.join_(net, "b", {"b": cn.collect(net, "b", [x])})
    assert_refused(net, "site '0' has been compressed already", "b")


def test_a_site_that_fails_late_leaves_the_earlier_ones_as_they_were():
    """An A with NaN at the last site: said by site, as `normalize_` does, and nothing replaced."""
    net, _ = network("mlp", "residual")
    with torch.no_grad():
        net.domains["a"].adapters["2"].A.A[1, 1] = torch.nan
    assert_refused(net, "site '2'.*NaN", "a", 2)
    assert_refused(net, "site '2'.*NaN", ["a", "b"], do=cn.join_svd_)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a", "x"],), "unknown domain 'x'"),
        (([],), "each once"),
        ((["a", "a"],), "each once"),
        ((["a", "norms"],), "'norms' has no matrix A"),
        ((["a", "beside"],), "different kinds"),
        ((["a", "thin"],), "'thin': site '0' has been compressed already"),
        ((["a", "b"], 0), "rank=0"),
        ((["a", "b"], 2, "taken"), "basis 'taken' exists already"),
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
