"""Truncated SVD of A, alone and of several domains stacked."""

from __future__ import annotations

import pytest
import torch
import zoo
from two_domains import assert_refused, network

import torch_covnorm as cn
from torch_covnorm.adapters import LowRankMap
from torch_covnorm.compress.geometric import joint_svd, svd

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


def test_singular_values_whose_squares_underflow_give_no_infinite_factors():
    A = torch.diag(torch.tensor([1.0, 1e-170, 0.0], dtype=torch.float64))
    C, W = svd(A, 3)
    assert C.float().isfinite().all()
    close(C @ W, A)


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


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.0, 1.5, -0.5, float("nan"), float("inf"), True])
def test_a_rank_that_is_none_is_refused_and_the_network_stays_as_it_was(rank):
    assert_refused(network("mlp", "residual")[0], f"rank={rank}", "a", rank)


def test_what_has_no_trained_full_A_is_refused_and_stays_as_it_was():
    net = zoo.network("mlp", kinds=("residual", "lowrank", "batchnorm", "own", "mask"))
    moments = cn.collect(net, "residual", [(torch.randn(20, 12), None)])
    for name in ("batchnorm", "own", "mask"):
        assert_refused(net, f"domain '{name}': it has no matrix A", name)
    assert_refused(net, "domain 'lowrank': site '0' is already compressed", "lowrank")
    assert_refused(net, "unknown domain 'residul': did you mean 'residual'", "residul")
    cn.normalize_(net, "residual", moments, variance=0.9)
    assert_refused(net, "domain 'residual': site '0' is already compressed", "residual")
    cn.absorb_(net, "residual")
    assert_refused(net, "already compressed.*method='ra'", "residual")
    net, x = network("mlp")
    cn.svd_(net, "a", 2)
    assert_refused(net, "site '0' is already compressed", "a", 1)
    cn.join_(net, "b", {"b": cn.collect(net, "b", [x])})
    assert_refused(net, "site '0' is already compressed", "b")


def test_a_site_that_fails_late_leaves_the_earlier_ones_as_they_were():
    """An A with NaN at the last site: said by site, as `normalize_` does, and nothing replaced."""
    net, _ = network("mlp", "residual")
    with torch.no_grad():
        net.domains["a"].adapters["2"].A.A[1, 1] = torch.nan
    assert_refused(net, "site '2'.*NaN", "a", 2)
    assert_refused(net, "site '2'.*NaN", ["a", "b"], do=cn.join_svd_)
