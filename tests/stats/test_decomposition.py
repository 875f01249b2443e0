"""A ≈ C M W: whitening, coloring, the closed-form M, and what truncation costs."""

import itertools

import pytest
import torch

from torch_covnorm import CovNormError, Moments
from torch_covnorm.adapters import CovNormMap
from torch_covnorm.stats.decomposition import PCA, closed_form, color, decompose, whiten


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features(d, n=2000, seed=0):
    """Correlated rows (n, d) whose spectrum falls by a factor of a hundred, mean not zero."""
    scales = torch.logspace(0, -1, d, dtype=torch.float64)
    return (random(n, d, seed=seed) * scales) @ random(d, d, seed=seed + 1) + random(d, seed=seed)


def problem(d_in=8, d_out=8, x=None):
    """Rows x, a map A x + b, and the moments of its input."""
    x = features(d_in) if x is None else x
    A, b = random(d_out, d_in, seed=7), random(d_out, seed=8)
    return x, A, b, Moments(d_in).update(x)


def normalized(A, b, moments, kx, ky, M="closed-form", scaled=True, generator=None):
    """The factors of eq. 8 at these ranks."""
    return decompose(A, moments, b=b, scaled=scaled).cut(kx, ky, M, generator)


def apply(factors, x):
    W, M, C, mu_x, mu_y = factors
    return (x - mu_x) @ (C @ M @ W).T + mu_y


def cost(x, A, b, factors):
    """E ||A x + b - y||^2 of what the factors answer."""
    return (x @ A.T + b - apply(factors, x)).square().sum(1).mean()


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ── W and C ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("k", [1, 3, 8])
def test_whitened_features_have_identity_covariance(k):
    x, _, _, moments = problem()
    W = whiten(PCA.of(moments))[:k]
    assert W.shape == (k, 8)
    centred = x - x.mean(0)
    close((centred @ W.T).T @ (centred @ W.T) / len(x), torch.eye(k, dtype=x.dtype))


def test_colored_white_noise_has_the_covariance_of_y():
    x, A, b, moments = problem(d_in=8, d_out=6)
    py = PCA.of(moments.transform(A, b))
    C = color(py)
    assert C.shape == (6, 6)
    y = x @ A.T + b
    covariance = (y - y.mean(0)).T @ (y - y.mean(0)) / len(y)
    close(C @ C.T, covariance)
    for k in (1, 4):  # truncated: the covariance along the k largest directions
        P = py.P[:, :k]
        close(C[:, :k] @ C[:, :k].T, P @ P.T @ covariance @ P @ P.T)


def test_coloring_undoes_whitening():
    _, _, _, moments = problem()
    px = PCA.of(moments)
    close(color(px) @ whiten(px), torch.eye(8, dtype=torch.float64))


# ── closed-form M ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("d_in", "d_out"), [(8, 8), (5, 9), (9, 5), (1, 1), (6, 1), (1, 6)])
def test_at_full_rank_the_closed_form_reproduces_A(d_in, d_out):
    x, A, b, moments = problem(d_in, d_out)
    W, M, C, mu_x, mu_y = normalized(A, b, moments, d_in, d_out)
    assert (W.shape, M.shape, C.shape) == ((d_in, d_in), (d_out, d_in), (d_out, d_out))
    close(C @ M @ W, A)
    close(mu_y - C @ M @ W @ mu_x, b)
    close(apply((W, M, C, mu_x, mu_y), x), x @ A.T + b)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x * torch.tensor([1, 0, 1, 1, 0, 1]),  # dead channels
        lambda x: torch.cat([x[:, :5], torch.full((len(x), 1), 3.0)], 1),  # a constant one
        lambda x: torch.cat([x[:, :3], x[:, :3]], 1),  # twins
        lambda x: x[:3],  # fewer rows than features
        lambda x: x[:1],
        torch.zeros_like,
        lambda x: x * 1e-6,
        lambda x: x * 1e6,
    ],
    ids=["dead", "constant", "twins", "few rows", "one row", "all dead", "tiny", "huge"],
)
def test_full_rank_reproduces_A_also_where_features_do_not_vary(spoil, scaled):
    """On every input, not only on those that were seen: a channel may wake up later."""
    _, A, b, moments = problem(6, 6, spoil(features(6)).double())
    factors = normalized(A, b, moments, 6, 6, scaled=scaled)
    assert all(f.isfinite().all() for f in factors)
    close(factors.C @ factors.M @ factors.W, A)
    unseen = random(10, 6, seed=3)
    close(apply(factors, unseen), unseen @ A.T + b, 1e-8)


def test_a_dead_output_does_no_harm():
    x = features(6)
    A, b = random(6, 6, seed=7), random(6, seed=8)
    A[2] = 0
    moments = Moments(6).update(x)
    factors = normalized(A, b, moments, 6, 6)
    close(factors.C @ factors.M @ factors.W, A)
    zero = torch.zeros(6, 6)
    factors = normalized(zero, b, moments, 6, 6)
    close(apply(factors, x), b.expand(len(x), 6))


@pytest.mark.parametrize(("kx", "ky"), [(8, 8), (8, 3), (3, 8), (4, 2), (1, 1)])
def test_the_closed_form_is_the_least_squares_M(kx, ky):
    """min over M of E ||A(x - mu) - C M W(x - mu)||^2, solved from the rows with no formula."""
    x, A, b, moments = problem()
    factors = normalized(A, b, moments, kx, ky)
    W, M, C = factors.W, factors.M, factors.C
    centred = x - x.mean(0)
    # y_ni = sum over k, j of w_nk C_ij M_jk: one row for each n, i, one unknown for each k, j.
    design = torch.einsum("nk,ij->nikj", centred @ W.T, C).reshape(-1, kx * ky)
    solution = torch.linalg.lstsq(design, (centred @ A.T).reshape(-1, 1)).solution
    close(M, solution.reshape(kx, ky).T)
    close(M, torch.linalg.pinv(C) @ A @ torch.linalg.pinv(W))
    close(M, closed_form(A, W, C))
    best = cost(x, A, b, factors)
    for seed in range(5):
        for size in (1e-3, 0.1):
            worse = factors._replace(M=M + size * random(ky, kx, seed=seed))
            assert cost(x, A, b, worse) > best


def test_a_float32_A_is_normalised_in_float64():
    _, A, b, moments = problem()
    factors = normalized(A.float(), b, moments, 8, 8)
    assert factors.M.dtype == torch.float64
    close(factors.C @ factors.M @ factors.W, A.float().double())


# ── what truncation costs ───────────────────────────────────────────────────────────────────────


def svd_truncation(A, k):
    U, s, V = torch.linalg.svd(A)
    return U[:, :k] * s[:k] @ V[:k]


@pytest.mark.parametrize("k", range(1, 8))
def test_with_all_of_x_the_error_is_the_discarded_output_variance_and_no_rank_k_map_is_better(k):
    x, A, b, moments = problem()
    error = cost(x, A, b, normalized(A, b, moments, 8, k))
    close(error, moments.transform(A, b).pca()[0][k:].sum())
    centred, rivals = x - x.mean(0), [svd_truncation(A, k)]
    # Eckart–Young in the metric of the data, found without a PCA of y: the least there is.
    Z = centred @ A.T
    U, s, V = torch.linalg.svd(Z, full_matrices=False)
    least = (Z - U[:, :k] * s[:k] @ V[:k]).square().sum(1).mean()
    close(error, least)
    rivals += [random(8, k, seed=s) @ random(k, 8, seed=s + 9) for s in range(5)]
    assert all((Z - centred @ B.T).square().sum(1).mean() >= error for B in rivals)


def test_where_the_data_are_anisotropic_svd_of_A_loses_by_far():
    x, A, b, moments = problem()
    error = cost(x, A, b, normalized(A, b, moments, 8, 3))
    centred = x - x.mean(0)
    truncated = (centred @ (A - svd_truncation(A, 3)).T).square().sum(1).mean()
    assert truncated > 1.5 * error


def test_truncating_the_input_too_can_only_add_error():
    x, A, b, moments = problem()
    for ky in (2, 5, 8):
        errors = [cost(x, A, b, normalized(A, b, moments, k, ky)) for k in range(1, 9)]
        assert all(fewer >= more - 1e-9 for fewer, more in itertools.pairwise(errors))


@pytest.mark.parametrize("M", ["identity", "random"])
@pytest.mark.parametrize(("kx", "ky"), [(8, 8), (5, 3), (3, 5)])
def test_an_M_that_does_not_align_the_two_PCAs_is_far_worse(M, kx, ky):
    x, A, b, moments = problem()
    g = torch.Generator().manual_seed(0)
    control = normalized(A, b, moments, kx, ky, M, generator=g)
    aligned = normalized(A, b, moments, kx, ky)
    assert control.M.shape == aligned.M.shape == (ky, kx)
    assert cost(x, A, b, control) > 2 * cost(x, A, b, aligned)


def test_identity_and_random_M_are_what_they_say():
    _, A, b, moments = problem()
    identity = normalized(A, b, moments, 5, 3, "identity").M
    assert torch.equal(identity, torch.eye(3, 5, dtype=torch.float64))
    draws = [
        normalized(A, b, moments, 8, 8, "random", generator=torch.Generator().manual_seed(s)).M
        for s in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert 0.005 < draws[0].std() < 0.02
    with pytest.raises(CovNormError, match="identity"):
        normalized(A, b, moments, 5, 3, "identty")


# ── the constant ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("M", ["closed-form", "identity", "random"])
@pytest.mark.parametrize(("kx", "ky"), [(8, 6), (3, 5), (5, 2)])
def test_the_constant_is_mu_y_minus_C_M_W_mu_x_and_keeps_the_mean(M, kx, ky):
    x, A, b, moments = problem(8, 6)
    factors = normalized(A, b, moments, kx, ky, M)
    W, mini, C, mu_x, mu_y = factors
    close(mu_x, x.mean(0))
    close(mu_y, (x @ A.T + b).mean(0))
    map_ = CovNormMap.from_factors(spatial=False, factors=factors).double()
    absorbed = map_.absorbed().double()
    for f in (map_, absorbed):  # parameters may be float32
        close(f(torch.zeros(1, 8, dtype=x.dtype))[0], mu_y - C @ mini @ W @ mu_x, 1e-5)
        close(f(x).mean(0), mu_y, 1e-5)
        close(f(x), apply(factors, x), 1e-4)
    assert sum(f.numel() for f in absorbed.factors) == (8 + 6) * min(kx, ky)


def test_without_the_mean_the_answers_are_wrong():
    """Negative control: the features' mean is not zero, so leaving a constant out shows."""
    x, A, b, moments = problem()
    factors = normalized(A, b, moments, 8, 4)
    right = cost(x, A, b, factors)
    assert cost(x, A, b, factors._replace(mu_x=torch.zeros_like(factors.mu_x))) > 1.1 * right
    assert cost(x, A, b, factors._replace(mu_y=-factors.mu_y)) > 1.1 * right


def test_moments_that_go_on_growing_do_not_change_a_decomposition():
    x, A, _, moments = problem()
    part = decompose(A, moments)
    moments.update(x + 5)
    close(part.mu_x, x.mean(0))
    close(part.mu_y, A @ x.mean(0))
