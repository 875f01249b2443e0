"""The one eigensolver and SVD: right on hard matrices, or an error that names the site."""

from __future__ import annotations

import pytest
import torch

from torch_covnorm import CovNormError, Moments
from torch_covnorm.errors import at_site
from torch_covnorm.stats import solver
from torch_covnorm.stats.decomposition import decompose


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(d=8, condition=1e12, seed=0):
    """A covariance whose eigenvalues fall by `condition`, and those eigenvalues."""
    Q = torch.linalg.qr(random(d, d, seed=seed)).Q
    E = torch.logspace(0, -torch.log10(torch.tensor(condition)), d, dtype=torch.float64)
    return (Q * E) @ Q.T, E


SCALES = [1e-300, 1e-150, 1.0, 1e150]


@pytest.mark.parametrize("scale", SCALES)
def test_eigh_is_right_at_every_scale_and_with_dead_channels(scale):
    S, E = covariance()
    S = torch.block_diag(S, torch.zeros(3, 3))[[3, 8, 0, 1, 9, 2, 4, 5, 10, 6, 7]]
    S = S[:, [3, 8, 0, 1, 9, 2, 4, 5, 10, 6, 7]] * scale
    values, P = solver.eigh(S)
    torch.testing.assert_close(values[:8] / scale, E, rtol=1e-3, atol=1e-14)
    assert (values[8:] == 0).all()
    torch.testing.assert_close(P.T @ P, torch.eye(11).double())
    torch.testing.assert_close((P * (values / scale)) @ P.T, S / scale)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 3)])
@pytest.mark.parametrize("scale", SCALES)
def test_svd_and_pinv_are_right_at_every_scale(shape, scale):
    A = random(*shape)
    for full in (False, True):
        U, s, Vt = solver.svd(A * scale, full=full)
        k = len(s)
        torch.testing.assert_close((U[:, :k] * (s / scale)) @ Vt[:k], A)
        torch.testing.assert_close(U.T @ U, torch.eye(U.shape[1]).double())
    torch.testing.assert_close(solver.pinv(A * scale) * scale, torch.linalg.pinv(A))


def test_roots_of_an_ill_conditioned_matrix_are_inverse_to_each_other():
    S, E = covariance()
    root, inverse = solver.roots(S)
    torch.testing.assert_close(root @ inverse, torch.eye(8).double())
    floored = E.clamp(min=solver.EIGENVALUE_FLOOR)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(root @ root).flip(0), floored, rtol=1e-6, atol=0
    )
    torch.testing.assert_close(solver.root(S) @ solver.root(S), S)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0])
@pytest.mark.parametrize("dead", [False, True])
def test_the_loss_metric_holds_with_g_at_1e_300_dead_channels_and_an_ill_conditioned_sigma(
    scale, dead
):
    """Full rank reproduces A, and a cut loses just the worth it drops, whatever the scale of G."""
    Sigma, _ = covariance(6, 1e10, seed=3)
    x = Moments(6)
    x.n, x.scatter, x.mean = 100, 100 * Sigma, random(6, seed=5)
    G = random(5, 5, seed=1)
    G = G @ G.T
    if dead:
        G[2] = G[:, 2] = 0
        x.scatter[4] = x.scatter[:, 4] = 0
    A = random(5, 6, seed=2)
    part = decompose(A, x, G * scale)
    factors = part.cut(6, 5)
    assert all(t.isfinite().all() for t in (*factors, part.worth))
    torch.testing.assert_close(factors.C @ factors.M @ factors.W, A, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(factors.mu_y, A @ x.mean)
    cut = part.cut(6, 2)
    D = A - cut.C @ cut.M @ cut.W
    lost = torch.trace(G @ D @ x.covariance @ D.T)
    dropped = (part.worth[2:] / scale).sum()
    assert float(lost) <= float(dropped) * (1 + 1e-4)
    if not dead:  # the floor of tiny and dead directions counts as worth, but loses less
        torch.testing.assert_close(lost, dropped, rtol=1e-2, atol=1e-9)
    expected = decompose(A, x, G)
    torch.testing.assert_close(part.worth / scale, expected.worth)
    torch.testing.assert_close(factors.C.abs(), expected.cut(6, 5).C.abs(), rtol=1e-4, atol=1e-6)


def test_control_without_the_scaling_g_at_1e_300_loses_its_worth():
    """The naive formula: squares of what is left at 1e-300 underflow."""
    G, A = 1e-300 * torch.eye(3).double(), random(3, 3)
    naive = torch.linalg.svdvals(G @ A).square()
    assert not naive.any()
    x = Moments(3).update(random(50, 3))
    assert (decompose(A, x, G).worth > 0).all()


def failing(times):
    """A solver that does not converge for the first calls."""
    calls = []

    def replace(right):
        def solve(*args, **kwargs):
            calls.append(args)
            if len(calls) <= times:
                raise torch.linalg.LinAlgError("did not converge")
            return right(*args, **kwargs)

        return solve

    return replace, calls


@pytest.mark.parametrize("times", [1, 2])
def test_a_solver_that_does_not_converge_has_fallbacks(times, monkeypatch):
    S, _ = covariance(5, 100)
    expected = solver.eigh(S), solver.svd(S)
    replace, calls = failing(times)
    monkeypatch.setattr(torch.linalg, "eigh", replace(torch.linalg.eigh))
    for found, right in zip(solver.eigh(S), expected[0], strict=True):
        torch.testing.assert_close(found, right)
    assert len(calls) >= times
    replace, calls = failing(times)
    monkeypatch.setattr(torch.linalg, "svd", replace(torch.linalg.svd))
    U, s, Vt = solver.svd(S)
    torch.testing.assert_close((U * s) @ Vt, S)
    assert len(calls) == times + 1


def test_what_no_solver_can_do_is_an_error_that_names_the_site(monkeypatch):
    S, _ = covariance(5, 100)
    replace, _ = failing(99)
    monkeypatch.setattr(torch.linalg, "eigh", replace(None))
    monkeypatch.setattr(torch.linalg, "svd", replace(None))
    for solve, what in ((solver.eigh, "eigendecomposition"), (solver.svd, "singular value")):
        with pytest.raises(CovNormError, match=f"site 'features.3': {what}.* failed"):
            with at_site("features.3"):
                solve(S)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused(bad):
    S = torch.eye(3).double()
    S[1, 2] = bad
    for solve in (solver.eigh, solver.svd, solver.roots, solver.root, solver.pinv):
        with pytest.raises(CovNormError, match=r"contains NaN or Inf\. Check the input images"):
            solve(S)
