"""Joint mode in the metric of the loss: C and W of what all domains' losses feel."""

from __future__ import annotations

import pytest
import torch
import two_domains

import torch_covnorm as cn
from torch_covnorm.stats.decomposition import decompose

pytestmark = pytest.mark.filterwarnings("ignore::torch_covnorm.CovNormWarning")  # sites everywhere


def world():
    """Two domains whose losses feel different things, their moments and gradients."""
    net, x = two_domains.network()
    images = {"a": x, "b": 2 * x.flip(0) - 1}
    moments = {n: cn.collect(net, n, [images[n]]) for n in images}
    gradients = {n: cn.collect_gradients(net, n, [images[n]], seed=3) for n in images}
    return net, images, moments, gradients


def matrices(net, name):
    return {s: A.matrix().detach().double() for s, A in net.domain(name).maps.items()}


def lost(net, before, moments, gradients):
    """Σ over domains and sites of tr(G (A - B) Sigma (A - B)^T), weighed by N, with the mean G."""
    total = 0.0
    for site in before["a"]:
        n = {d: moments[d][site].n for d in before}
        G = sum(n[d] * gradients[d][site].second() for d in before) / sum(n.values())
        for d in before:
            D = before[d][site] - matrices(net, d)[site]
            total += n[d] * float(torch.trace(G @ D @ moments[d][site].covariance @ D.T))
    return total


@pytest.mark.parametrize("k", [1, 3])
def test_with_one_domain_it_is_the_best_of_its_rank(k):
    net, _, moments, gradients = world()
    before = matrices(net, "a")
    ranks = dict.fromkeys(before, (k, k))
    cn.join_(net, "a", moments, ranks=ranks, metric="loss", gradients=gradients)
    for site, A in before.items():
        x, G = moments["a"][site], gradients["a"][site].second()
        best = decompose(A, x, G).cut(x.d, k)
        expected = best.C @ best.M @ best.W
        found = matrices(net, "a")[site]
        D = (found - expected) @ x.covariance @ (found - expected).T
        scale = torch.trace(G @ expected @ x.covariance @ expected.T)
        assert torch.trace(G @ D) <= 1e-6 * scale


def test_at_full_rank_every_domain_keeps_its_a():
    net, _, moments, gradients = world()
    before = {d: matrices(net, d) for d in "ab"}
    cn.join_(net, ["a", "b"], moments, 1.0, metric="loss", gradients=gradients)
    for d in "ab":
        for site, A in matrices(net, d).items():
            torch.testing.assert_close(A, before[d][site], rtol=1e-3, atol=1e-3)


def test_it_loses_less_than_the_basis_of_the_variance_at_equal_ranks():
    losses = {}
    for metric in ("variance", "loss"):
        net, _, moments, gradients = world()
        before = {d: matrices(net, d) for d in "ab"}
        ranks = dict.fromkeys(before["a"], (3, 3))
        felt = {"gradients": gradients} if metric == "loss" else {}
        cn.join_(net, ["a", "b"], moments, ranks=ranks, metric=metric, **felt)
        losses[metric] = lost(net, before, moments, gradients)
    assert losses["loss"] < 0.9 * losses["variance"]


def test_each_m_is_the_best_for_its_domain_in_the_mean_metric():
    net, _, moments, gradients = world()
    before = {d: matrices(net, d) for d in "ab"}
    ranks = dict.fromkeys(before["a"], (3, 2))
    cn.join_(net, ["a", "b"], moments, ranks=ranks, metric="loss", gradients=gradients)
    best = lost(net, before, moments, gradients)
    torch.manual_seed(0)
    for d in "ab":
        for A in net.domain(d).maps.values():
            for _ in range(3):
                step = 0.03 * torch.randn_like(A.M) * A.M.abs().max()
                with torch.no_grad():
                    A.M.add_(step)
                    assert lost(net, before, moments, gradients) > best
                    A.M.sub_(step)


def test_one_after_the_other_equals_all_at_once():
    net, images, moments, gradients = world()
    cn.join_(net, ["a", "b"], moments, 0.8, metric="loss", gradients=gradients)
    later, *_ = world()
    cn.join_(later, "a", moments, 0.8, metric="loss", gradients=gradients)
    done = cn.join_(later, "b", moments, grow=1.1, gradients=gradients)
    assert done.grown
    assert net.basis("joint").ranks == later.basis("joint").ranks
    for site, felt in net.basis("joint").felt.items():
        for one, other in zip(felt, later.basis("joint").felt[site], strict=True):
            torch.testing.assert_close(one, other)
    with torch.no_grad():  # "b" came with its own A both times
        one, other = net(images["b"], domain="b"), later(images["b"], domain="b")
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_what_a_basis_captures_is_a_share_of_the_loss_and_little_makes_it_grow():
    net, _, moments, gradients = world()
    ranks = dict.fromkeys(matrices(net, "a"), (1, 1))
    found = cn.join_(net, "a", moments, ranks=ranks, metric="loss", gradients=gradients)
    for site, (of_x, of_y) in found.captured["a"].items():
        A, x, G = matrices(world()[0], "a")[site], moments["a"][site], gradients["a"][site]
        s2 = decompose(A, x, G.second()).worth
        assert of_x == pytest.approx(float(s2[0] / s2.sum()), rel=1e-4)
        assert of_y == pytest.approx(float(s2[0] / s2.sum()), rel=1e-4)
    assert cn.join_(net, "b", moments, gradients=gradients).grown
    other, *_ = world()
    cn.join_(other, "a", moments, 1.0, metric="loss", gradients=gradients)
    assert not cn.join_(other, "b", moments, gradients=gradients).grown


def test_its_files_keep_what_a_further_domain_needs(tmp_path):
    net, images, moments, gradients = world()
    cn.join_(net, "a", moments, 0.8, metric="loss", gradients=gradients)
    net.save_basis("joint", tmp_path / "joint")
    net.save_domain("a", tmp_path / "a")
    again, *_ = world()
    again.remove_domain("a")
    again.load_basis(tmp_path / "joint")
    again.load_domain(tmp_path / "a")
    for one in (net, again):
        cn.join_(one, "b", moments, grow=1.1, gradients=gradients)
    with torch.no_grad():
        for d in "ab":
            assert torch.equal(net(images[d], domain=d), again(images[d], domain=d))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "loss"}, "collect_gradients"),
        ({"metric": "variance", "gradients": {}}, "metric='loss'"),
        ({"metric": "entropy"}, "loss, variance"),
    ],
)
def test_what_is_missing_is_said(arguments, message):
    net, _, moments, _ = world()

    def join(net):
        cn.join_(net, ["a", "b"], moments, **arguments)

    two_domains.assert_refused(net, message, do=join)


def test_a_basis_keeps_its_metric():
    net, _, moments, gradients = world()
    cn.join_(net, "a", moments)
    with pytest.raises(cn.CovNormError, match="metric='variance'"):
        cn.join_(net, "b", moments, metric="loss", gradients=gradients)


def test_adapt_joins_in_the_metric_of_the_loss_and_a_later_domain_follows():
    net, images, _, _ = world()
    for name in "ab":
        for _, adapter in net.domain(name).adapters.items():
            adapter.A.requires_grad_(True)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    data = {n: [(x, labels)] for n, x in images.items()}
    settings = {"method": "covnorm-joint", "tuning": {"epochs": 0}, "progress": False}
    cn.adapt(net, ["a"], [data["a"]], [data["a"]], metric="loss", variance=0.8, **settings)
    assert net.basis("joint").settings["metric"] == "loss"
    found = cn.adapt(net, "b", data["b"], data["b"], **settings)  # its metric is the basis's
    assert found.joined is not None
    assert set(net.basis("joint").felt) == set(net.basis("joint").factors)
    with pytest.raises(cn.CovNormError, match="metric='loss'"):
        cn.adapt(net, "c", data["b"], data["b"], metric="variance", **settings)


def test_where_no_loss_is_sensitive_the_basis_captures_everything():
    """A floor under G would turn the share of the loss into a share of the variance of y."""
    net, _, moments, gradients = world()
    site, d = next(iter(gradients["a"].items()))[0], next(iter(gradients["a"].values())).d
    for name in "ab":
        gradients[name][site] = cn.GradientMoments(d)
        gradients[name][site].update(torch.zeros(8, d), spatial=False)
    first = cn.join_(net, "a", moments, metric="loss", gradients=gradients)
    later = cn.join_(net, "b", moments, gradients=gradients)
    assert first.captured["a"][site] == later.captured["b"][site] == (1.0, 1.0)
