"""The gradients behind the metric of the loss: whose they are, and of which images."""

from __future__ import annotations

import threading

import pytest
import small_digits
import torch
import torch.nn.functional as F
from torch import nn

import torch_covnorm as cn
from torch_covnorm.methods import run
from torch_covnorm.network.routing import stepwise


@pytest.fixture(scope="module")
def trained():
    return small_digits.trained()


def by_hand(net, data, labels):
    """Σ g gᵀ / images by a loop over single images, in the formula's own words."""
    sums, n = {}, 0
    for x, y in zip(torch.cat([b[0] for b in data]), labels, strict=True):
        seen = {}
        hooks = [
            A.register_forward_hook(lambda _, __, out, s=site, seen=seen: seen.update({s: out}))
            for site, A in net.domain("ra").maps.items()
        ]
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


# ── which images ─────────────────────────────────────────────────────────────────────────────


def test_few_of_many_images_are_taken_evenly(trained):
    """A folder's images are sorted by class: the first ones alone are of the first classes."""
    net, data = trained
    x, y = torch.cat([b[0] for b in data]), torch.cat([b[1] for b in data])
    found = cn.collect_gradients(net, "ra", data, 60, labels="given")
    chosen = [i for i in range(200) if (i + 1) * 60 // 200 > i * 60 // 200]
    even = cn.collect_gradients(net, "ra", [(x[chosen], y[chosen])], labels="given")
    unknown = (batch for batch in data)  # how long it is
    first = cn.collect_gradients(net, "ra", unknown, 60, labels="given")
    start = cn.collect_gradients(net, "ra", [(x[:60], y[:60])], labels="given")
    for site, g in found.items():
        assert g.images == 60
        torch.testing.assert_close(g.second(), even[site].second(), rtol=1e-4, atol=1e-9)
        assert first[site].images == 60
        torch.testing.assert_close(first[site].second(), start[site].second(), rtol=1e-4, atol=1e-9)
        assert not torch.allclose(g.second(), start[site].second(), rtol=1e-2)


def test_adapt_takes_them_from_all_of_the_validation_images(trained, monkeypatch):
    net, data = trained
    found = []

    def collect(net, name, loader, **settings):
        found.append(cn.collect_gradients(net, name, loader, 60, **settings))
        return found[0]

    monkeypatch.setattr(run, "collect_gradients", collect)
    settings = {"metric": "loss", "budget": 80, "tuning": {"epochs": 0}}
    cn.adapt(net, "few", data, data, start="ra", **settings)
    net.remove_domain("few")
    even = cn.collect_gradients(net, "ra", data, 60)
    first = cn.collect_gradients(net, "ra", data[:3], 60)
    assert all(torch.equal(g.second(), even[s].second()) for s, g in found[0].items())
    assert not any(torch.equal(g.second(), first[s].second()) for s, g in found[0].items())


# ── unusual networks ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("adapter", ["residual", "conv", "parallel"])
def test_a_layer_behind_that_works_in_place_changes_nothing(adapter):
    """The gradient is at A's output, and not behind the ReLU that takes its place."""
    found = []
    for in_place in (False, True):
        torch.manual_seed(0)
        layers = (nn.Conv2d(1, 6, 3), nn.ReLU(in_place), nn.Conv2d(6, 6, 3), nn.ReLU(in_place))
        ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
        net = cn.MultiDomainNetwork(nn.Sequential(*layers, *ends))
        net.add_domain("d", classes=10, adapter=adapter)
        with torch.no_grad():
            for A in net.domain("d").maps.values():
                A.bias.add_(0.1 * torch.randn(len(A.bias)))
        found.append(cn.collect_gradients(net, "d", small_digits.batches(40, 20)))
    for site, g in found[0].items():
        assert g.second().any()
        torch.testing.assert_close(found[1][site].second(), g.second(), rtol=1e-5, atol=1e-12)


class Windows(nn.Module):
    """A linear layer over four windows of an image: as a batch of windows, or along an axis."""

    def __init__(self, folded: bool, twice: bool = False, more: int = 0) -> None:
        super().__init__()
        self.site, self.fc = nn.Linear(16, 16), nn.Linear(16, 5)
        self.folded, self.twice, self.more = folded, twice, more

    def forward(self, x):
        cut = x.reshape(len(x), 4, 16)
        rows = cut.reshape(-1, 16) if self.folded else cut
        rows = torch.cat([rows, rows[: self.more]]) if self.more else rows
        y = self.site(rows)
        y = self.site(y.tanh()) if self.twice else y
        return self.fc(y[: 4 * len(x)].reshape(len(x), 4, 16).mean(1))


def windows(**how):
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(Windows(**how), sites=lambda name, _: name == "site")
    torch.manual_seed(1)
    net.add_domain("d", classes=10)
    return net


@pytest.mark.parametrize("twice", [False, True])
def test_images_are_counted_and_not_the_windows_or_calls_of_a_layer(twice):
    data = small_digits.batches(40, 20)
    along, folded = (
        cn.collect_gradients(windows(folded=f, twice=twice), "d", data)["site"] for f in (0, 1)
    )
    assert along.images == folded.images == 40
    for part in (None, 0, 1, 2, 3):
        torch.testing.assert_close(folded.second(part), along.second(part))
    if twice:  # the rows of both calls
        assert sum(p.n for p in along.parts) == 40 * 4 * 2


def test_gradients_that_belong_to_no_image_are_refused():
    with pytest.raises(cn.CovNormError, match="site 'site': 81 gradients for 20 images"):
        cn.collect_gradients(windows(folded=True, more=1), "d", small_digits.batches(20, 20))


def test_calls_of_other_threads_are_not_taken_in(trained):
    net, data = trained
    expected = cn.collect_gradients(net, "ra", data[:2])

    def beside():
        for batch in data[:2]:
            other = threading.Thread(target=lambda x=batch[0]: net(x, domain="ra"))
            other.start()
            other.join()
            yield batch

    found = cn.collect_gradients(net, "ra", beside())
    assert all(torch.equal(found[s].second(), g.second()) for s, g in expected.items())


def test_answers_and_batches_that_cannot_be_used_are_said(trained):
    net, data = trained
    alone, broken = [b[0] for b in data], [(torch.full_like(data[0][0], torch.nan), data[0][1])]
    with pytest.raises(cn.CovNormError, match="yields only images"):
        cn.collect_gradients(net, "ra", alone, labels="given")
    with pytest.raises(cn.CovNormError, match="returns NaN"):
        cn.collect_gradients(net, "ra", broken)
    flat = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 5, 1))
    maps = cn.MultiDomainNetwork(flat)
    maps.add_domain("d")
    with pytest.raises(cn.CovNormError, match=r"shape \(20, 5, 6, 6\), not one score per class"):
        cn.collect_gradients(maps, "d", data[:1])
