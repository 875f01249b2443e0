"""CovNorm in the metric of the loss: its gradients, its closed form, its budget."""

from __future__ import annotations

import itertools

import pytest
import small_digits
import torch

import torch_covnorm as cn
from torch_covnorm.compress.gradients import predicted_loss
from torch_covnorm.stats.decomposition import decompose, pooled_bases
from torch_covnorm.stats.pooling import LossMetric
from torch_covnorm.stats.ranks import by_budget


def problem(seed=0, d_out=4, d_in=5, n=300):
    """A matrix, moments of correlated features, and a metric G that is far from the identity."""
    torch.manual_seed(seed)
    rows = torch.randn(n, d_in, dtype=torch.float64) @ torch.randn(d_in, d_in).double()
    root = torch.randn(d_out, d_out).double()
    A = torch.randn(d_out, d_in).double()
    return A, cn.Moments(d_in).update(rows + 1), root @ root.T + 0.01 * torch.eye(d_out)


def error(B, A, Sigma, G):
    """E|G^{1/2} (A - B) x|²"""
    return torch.trace(G @ (A - B) @ Sigma @ (A - B).T)


def cut(A, x, G, k):
    """The factors of rank k that cost the loss least, and what every direction is worth."""
    part = decompose(A, x, G)
    return part.cut(len(part.W), k), part.worth


def matrix(factors):
    return factors.C @ factors.M @ factors.W


# ── the closed form ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_gradient_descent_finds_a_better_matrix_of_its_rank(seed, k):
    A, x, G = problem(seed)
    factors, s2 = cut(A, x, G, k)
    best = error(matrix(factors), A, x.covariance, G)
    assert float(best) == pytest.approx(float(s2[k:].sum()), rel=1e-6)
    for start in range(4):
        torch.manual_seed(100 + start)
        C = torch.randn(4, k, dtype=torch.float64, requires_grad=True)
        W = torch.randn(k, 5, dtype=torch.float64, requires_grad=True)
        solver = torch.optim.LBFGS([C, W], max_iter=400, line_search_fn="strong_wolfe")

        def loss(C=C, W=W, solver=solver):
            solver.zero_grad()
            value = error(C @ W, A, x.covariance, G)
            value.backward()
            return value

        solver.step(loss)
        assert error(C @ W, A, x.covariance, G).item() >= float(best) * (1 - 1e-6)


def test_control_the_pca_of_the_output_is_worse_in_this_metric():
    A, x, G = problem()
    ours = matrix(cut(A, x, G, 2)[0])
    P = x.transform(A, torch.zeros(4).double()).pca()[1][:, :2]
    assert error(ours, A, x.covariance, G) < 0.9 * error(P @ P.T @ A, A, x.covariance, G)


def test_with_g_the_identity_it_is_the_pca_of_the_output():
    A, x, _ = problem()
    found, s2 = cut(A, x, torch.eye(4).double(), 2)
    E, P = x.transform(A, torch.zeros(4).double()).pca()
    torch.testing.assert_close(matrix(found), P[:, :2] @ P[:, :2].T @ A)
    torch.testing.assert_close(s2, E)


def test_with_white_features_too_it_is_the_svd():
    A = problem()[0]
    white = cn.Moments(5)
    white.load_state_dict(
        {"n": torch.tensor(10), "mean": torch.zeros(5), "scatter": 10 * torch.eye(5).double()}
    )
    found, s2 = cut(A, white, torch.eye(4), 2)
    U, s, V = torch.linalg.svd(A, full_matrices=False)
    torch.testing.assert_close(matrix(found), U[:, :2] @ torch.diag(s[:2]) @ V[:2])
    torch.testing.assert_close(s2, s.square())


def test_at_full_rank_it_reproduces_a_and_w_whitens():
    A, x, G = problem()
    part = decompose(A, x, G)
    found = part.cut(len(part.W), part.C.shape[1])
    torch.testing.assert_close(matrix(found), A)
    torch.testing.assert_close(found.W @ x.covariance @ found.W.T, torch.eye(5).double())


def test_by_a_share_of_the_loss_all_of_x_stays_and_y_keeps_the_smallest_rank_above_it():
    A, x, G = problem()
    part = decompose(A, x, G)
    shares = part.worth.cumsum(0) / part.worth.sum()
    for t in (0.5, 0.9, 0.99):
        ky = 1 + int((shares <= t).sum())
        assert part.ranks(t) == (5, ky)
        lost = error(matrix(part.cut(*part.ranks(t))), A, x.covariance, G)
        assert lost <= (1 - t) * error(0 * A, A, x.covariance, G) * (1 + 1e-6)
    in_variance = decompose(A, x)  # a control: there x is cut too
    assert in_variance.ranks(0.5)[0] < 5


def test_a_sure_network_has_the_same_factors_as_a_doubtful_one():
    """Gradients vanish as a network grows sure: the units in which M is tuned must not."""
    A, x, G = problem()
    for scale in (1e-8, 1e4):
        found, _ = cut(A, x, G, 2)
        scaled, _ = cut(A, x, scale * G, 2)
        torch.testing.assert_close(scaled.M, found.M)
        torch.testing.assert_close(scaled.C.abs(), found.C.abs())
        y = x.transform(matrix(found), torch.zeros(4).double()).covariance
        torch.testing.assert_close(found.C @ found.C.T, y)  # it colors


def test_dead_features_and_gradients_give_no_nan():
    A, _, _ = problem()
    rows = torch.randn(50, 5).double()
    rows[:, 2] = 0
    x = cn.Moments(5).update(rows)
    for G in (torch.zeros(4, 4).double(), torch.diag(torch.tensor([1.0, 0, 0, 0])).double()):
        found, s2 = cut(A, x, G, 3)
        assert all(t.isfinite().all() for t in (*found, s2))


def test_a_site_that_no_loss_feels_or_that_never_varies_is_worth_nothing():
    A, x, G = problem()
    still = cn.Moments(5).update(torch.ones(20, 5).double())
    live = decompose(A, x, 1e-6 * G).worth
    for of_x, of_y in ((x, 0 * G), (still, G)):
        dead = decompose(A, of_x, of_y).worth
        assert not dead.any()
        spectra, costs = {"dead": dead, "live": live}, {"dead": 9, "live": 9}
        assert by_budget(spectra, costs, 27, least=0) == {"dead": 0, "live": 3}
    y = x.transform(A)
    assert not pooled_bases(still, y, LossMetric(G, G.new_ones(5, 5))).x_worth.any()
    assert not pooled_bases(x, y, LossMetric(0 * G, G.new_ones(5, 5))).worth.any()
    shared = pooled_bases(x, y, LossMetric(G, G.new_ones(5, 5)))  # a control
    assert shared.x_worth.any()
    assert shared.worth.any()


def test_greedy_is_brute_force_at_equal_costs_and_may_leave_a_site_nothing():
    for seed in range(10):
        torch.manual_seed(seed)
        spectra = {s: torch.rand(3).sort(descending=True).values ** 3 for s in "abc"}
        found = by_budget(spectra, dict.fromkeys(spectra, 1), 4, least=0)
        every = [r for r in itertools.product(range(4), repeat=3) if sum(r) <= 4]
        worth = [sum(float(spectra[s][:k].sum()) for s, k in zip("abc", r)) for r in every]  # noqa: B905
        assert sum(float(spectra[s][:k].sum()) for s, k in found.items()) == pytest.approx(
            max(worth)
        )
    assert (
        by_budget({"a": torch.tensor([1.0]), "b": torch.tensor([0.0])}, {"a": 1, "b": 1}, 9, 0)["b"]
        == 0
    )


@pytest.fixture(scope="module")
def trained():
    return small_digits.trained()


# ── over a network ───────────────────────────────────────────────────────────────────────────


def test_the_predicted_loss_is_the_change_of_the_likelihood_for_small_errors(trained):
    """½ Σ s² of what is dropped, against the measured KL divergence to the trained network."""
    net, data = trained
    net.eval()
    moments, gradients = cn.collect(net, "ra", data), cn.collect_gradients(net, "ra", data, None)
    x = torch.cat([b[0] for b in data])
    with torch.no_grad():
        before = net(x, domain="ra").log_softmax(1)
    net.copy_domain("ra", "cut")
    cn.normalize_(net, "cut", moments, budget=150, metric="loss", gradients=gradients)
    predicted = 0.0
    for site, A in net.domain("ra").maps.items():
        B = net.domain("cut").maps[site].matrix()
        delta = (A.matrix() - B).detach().double()
        predicted += 0.5 * float(
            error(0 * delta, delta, moments[site].covariance, gradients[site].second())
        )
    with torch.no_grad():
        after = net(x, domain="cut").log_softmax(1)
    measured = float((before.exp() * (before - after)).sum(1).mean())
    net.remove_domain("cut")
    assert measured > 0
    assert predicted / 4 < measured < predicted * 4


def test_a_rank_of_zero_leaves_the_constant_everywhere(trained, tmp_path):
    net, data = trained
    moments, gradients = cn.collect(net, "ra", data), cn.collect_gradients(net, "ra", data)
    net.copy_domain("ra", "none")
    ranks = dict.fromkeys(net.sites, (0, 0))
    cn.normalize_(net, "none", moments, ranks=ranks, metric="loss", gradients=gradients)
    assert net.num_parameters("none")["adapter"] == 0
    x = data[0][0]
    net.eval()
    with torch.no_grad():
        folded = net(x, domain="none")
        from torch_covnorm.network.routing import stepwise

        with stepwise():
            step = net(x, domain="none")
        torch.testing.assert_close(step, folded, rtol=1e-4, atol=1e-5)
        mixed = net(torch.cat([x, x]), domain=["none"] * len(x) + ["ra"] * len(x))
        torch.testing.assert_close(mixed[: len(x)], folded, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net.merge("none")(x), folded, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(net(x, domain="ra"), folded, atol=1e-2)
    cn.absorb_(net, "none")
    net.load_domain(net.save_domain("none", tmp_path / "d"), "again")
    with torch.no_grad():
        torch.testing.assert_close(net(x, domain="again"), folded, rtol=1e-4, atol=1e-5)
    cn.fit(net, "again", data, epochs=1)
    for name in ("none", "again"):
        net.remove_domain(name)


def test_settings_that_do_not_fit_the_metric_are_refused(trained):
    net, data = trained
    moments, gradients = cn.collect(net, "ra", data), cn.collect_gradients(net, "ra", data)
    for settings, words in (
        ({"metric": "los"}, "did you mean 'loss'"),
        ({"metric": "loss"}, "needs gradients="),
        ({"metric": "loss", "budget": 1}, "needs gradients="),
        ({"metric": "loss", "gradients": {}}, "needs gradients of"),
        ({"metric": "loss", "gradients": gradients, "budget": 0.01}, "costs 12 parameters"),
        ({"metric": "loss", "gradients": gradients, "ranks": {"0": 3}}, r"give \(kx, ky\)"),
        ({"gradients": gradients}, "metric='loss'"),
        ({"metric": "loss", "gradients": gradients, "M": "random"}, "leave out M="),
    ):
        with pytest.raises(cn.CovNormError, match=words):
            cn.normalize_(net, "ra", moments, **settings)


def test_a_rank_beyond_the_narrower_side_is_refused():
    net = cn.MultiDomainNetwork(small_digits.backbone())
    data = small_digits.batches(40, 20)
    net.add_domain("wide", classes=10, adapter="parallel")
    moments, gradients = cn.collect(net, "wide", data), cn.collect_gradients(net, "wide", data)
    settings = {"metric": "loss", "gradients": gradients}
    with pytest.raises(cn.CovNormError, match=r"site '0': k_y = 2, must lie in 0…1"):
        cn.normalize_(net, "wide", moments, ranks={"0": (1, 2)}, **settings)


def test_a_budget_for_nothing_is_refused_before_the_training():
    net = cn.MultiDomainNetwork(small_digits.backbone())
    told = []
    with pytest.raises(
        cn.CovNormError, match="budget=5 is too small: one direction at the cheapest"
    ):
        cn.adapt(
            net,
            "d",
            small_digits.batches(),
            metric="loss",
            budget=5,
            classes=10,
            progress=told.append,
        )
    assert not told


def test_the_predicted_loss_and_its_error_by_a_loop_over_images_and_features():
    torch.manual_seed(0)
    before, after, moments, gradients = {}, {}, {}, {}
    by_image = torch.zeros(10, dtype=torch.float64)
    for site, d in {"a": 3, "b": 5}.items():
        x, g = torch.randn(7, d).double(), torch.randn(10, 2, d).double()  # two positions
        before[site], after[site] = torch.randn(2, d, d).double()
        moments[site] = cn.Moments(d).update(x)
        gradients[site] = cn.GradientMoments(d)
        gradients[site].update(g, spatial=False)
        for image, position, row in itertools.product(range(10), range(2), range(7)):
            change = (before[site] - after[site]) @ (x[row] - x.mean(0))
            by_image[image] += float(g[image, position] @ change) ** 2 / 7 / 2
    found = predicted_loss(before, after, moments, gradients)
    assert found["loss"] == pytest.approx(float(by_image.mean()))
    parts = torch.stack([by_image[i::4].mean() for i in range(4)])
    assert found["error"] == pytest.approx(float(parts.std() / 2))
