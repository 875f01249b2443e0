"""CovNorm in the metric of the loss: its gradients, its closed form, its budget."""

from __future__ import annotations

import itertools

import pytest
import small_digits
import torch
import torch.nn.functional as F

import torch_covnorm as cn
from torch_covnorm.normalize import PCA, loss_normalization
from torch_covnorm.ranks import by_budget


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


def matrix(factors):
    return factors.C @ factors.M @ factors.W


# ── the closed form ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_gradient_descent_finds_a_better_matrix_of_its_rank(seed, k):
    A, x, G = problem(seed)
    factors, s2 = loss_normalization(A, PCA.of(x), G, x.mean, k)
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
    ours = matrix(loss_normalization(A, PCA.of(x), G, x.mean, 2)[0])
    P = x.transform(A, torch.zeros(4).double()).pca()[1][:, :2]
    assert error(ours, A, x.covariance, G) < 0.9 * error(P @ P.T @ A, A, x.covariance, G)


def test_with_g_the_identity_it_is_the_pca_of_the_output():
    A, x, _ = problem()
    found, s2 = loss_normalization(A, PCA.of(x), torch.eye(4).double(), x.mean, 2)
    E, P = x.transform(A, torch.zeros(4).double()).pca()
    torch.testing.assert_close(matrix(found), P[:, :2] @ P[:, :2].T @ A)
    torch.testing.assert_close(s2, E)


def test_with_white_features_too_it_is_the_svd():
    A = problem()[0]
    white = cn.Moments(5)
    white.load_state_dict(
        {"n": torch.tensor(10), "mean": torch.zeros(5), "scatter": 10 * torch.eye(5).double()}
    )
    x = PCA.of(white)
    found, s2 = loss_normalization(A, x._replace(E=torch.ones(5).double()), torch.eye(4), x.mu, 2)
    U, s, V = torch.linalg.svd(A, full_matrices=False)
    torch.testing.assert_close(matrix(found), U[:, :2] @ torch.diag(s[:2]) @ V[:2])
    torch.testing.assert_close(s2, s.square())


def test_at_full_rank_it_reproduces_a_and_w_whitens():
    A, x, G = problem()
    found, _ = loss_normalization(A, PCA.of(x), G, x.mean)
    torch.testing.assert_close(matrix(found), A)
    torch.testing.assert_close(found.W @ x.covariance @ found.W.T, torch.eye(5).double())


def test_a_sure_network_has_the_same_factors_as_a_doubtful_one():
    """Gradients vanish as a network grows sure: the units in which M is tuned must not."""
    A, x, G = problem()
    for scale in (1e-8, 1e4):
        found, _ = loss_normalization(A, PCA.of(x), G, x.mean, 2)
        scaled, _ = loss_normalization(A, PCA.of(x), scale * G, x.mean, 2)
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
        found, s2 = loss_normalization(A, PCA.of(x), G, x.mean, 3)
        assert all(t.isfinite().all() for t in (*found, s2))


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


# ── the gradients ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained():
    net = cn.MultiDomainNetwork(small_digits.backbone())
    data = small_digits.batches(200, 20)
    cn.adapt(net, "ra", data, data[:3], method="ra", epochs=6, lr=0.02, classes=10)
    return net, data


def by_hand(net, data, labels):
    """Σ g gᵀ / images by a loop over single images, in the formula's own words."""
    sums, n = {}, 0
    for x, y in zip(torch.cat([b[0] for b in data]), labels, strict=True):
        seen = {}
        hooks = [
            A.register_forward_hook(lambda _, __, out, s=site, seen=seen: seen.update({s: out}))
            for site, A in net.domain("ra").maps.items()
        ]
        from torch_covnorm.routing import stepwise

        with stepwise():
            loss = F.log_softmax(net(x[None], domain="ra"), 1)[0, y]
        for hook in hooks:
            hook.remove()
        for site, g in zip(seen, torch.autograd.grad(loss, list(seen.values())), strict=True):
            rows = g[0].flatten(1).T.double()
            sums[site] = sums.get(site, 0) + rows.T @ rows
        n += 1
    return {site: value / n for site, value in sums.items()}


def test_gradients_are_those_of_each_image_alone_summed_over_positions(trained):
    net, data = trained
    net.eval()
    few = data[:2]
    found = cn.collect_gradients(net, "ra", few, labels="given")
    expected = by_hand(net, few, torch.cat([b[1] for b in few]).tolist())
    for site, G in expected.items():
        torch.testing.assert_close(found[site].second(), G, rtol=1e-4, atol=1e-9)
        assert found[site].images == 40


def test_any_batches_merged_give_the_same_and_the_parts_are_the_whole(trained):
    net, data = trained
    x, y = torch.cat([b[0] for b in data[:3]]), torch.cat([b[1] for b in data[:3]])
    whole = cn.collect_gradients(net, "ra", [(x, y)], labels="given")
    split = cn.collect_gradients(net, "ra", list(zip(x.split(7), y.split(7))), labels="given")  # noqa: B905
    ends = [
        cn.collect_gradients(net, "ra", [(x[a:b], y[a:b])], labels="given")
        for a, b in ((0, 24), (24, 60))
    ]
    for site, g in whole.items():
        torch.testing.assert_close(split[site].second(), g.second(), rtol=1e-4, atol=1e-9)
        merged = ends[0][site].merge(ends[1][site])
        torch.testing.assert_close(merged.second(), g.second(), rtol=1e-4, atol=1e-9)
        mean = sum(g.second(i) * g.parts[i].images for i in range(4)) / g.images
        torch.testing.assert_close(mean, g.second(), rtol=1e-8, atol=1e-12)
        copied = cn.GradientMoments(g.d)
        copied.load_state_dict(g.state_dict())
        assert torch.equal(copied.second(), g.second())


def test_labels_of_the_model_are_drawn_by_the_seed_and_change_nothing_of_the_network(trained):
    net, data = trained
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, again, other = (
        cn.collect_gradients(net, "ra", data, 60, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[s].second(), again[s].second()) for s in first)
    assert not all(torch.equal(first[s].second(), other[s].second()) for s in first)
    assert all(g.images == 60 for g in first.values())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(cn.CovNormError, match="did you mean 'model'"):
        cn.collect_gradients(net, "ra", data, labels="modl")


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
        from torch_covnorm.routing import stepwise

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
        ({"metric": "loss"}, "needs gradients of"),
        ({"gradients": gradients}, "metric='loss'"),
        ({"metric": "loss", "gradients": gradients, "M": "random"}, "leave out M="),
    ):
        with pytest.raises(cn.CovNormError, match=words):
            cn.normalize_(net, "ra", moments, **settings)
