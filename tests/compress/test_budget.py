"""Ranks by one budget for the whole network, and by the loss of accuracy that is allowed."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import small_digits
import torch

import torch_covnorm as cn
from torch_covnorm.compress.covnorm import decompose_sites, ranks_within
from torch_covnorm.stats.ranks import by_budget, smallest


def explained(spectra, ranks):
    return sum(float(E[: ranks[site]].sum()) for site, E in spectra.items())


def test_at_equal_costs_the_budget_explains_as_much_as_any_choice_could():
    for seed in range(20):
        torch.manual_seed(seed)
        spectra = {
            s: torch.rand(d).sort(descending=True).values
            for s, d in zip("abc", (3, 5, 4), strict=True)
        }
        costs = dict.fromkeys(spectra, 2)
        for budget in (6, 9, 14, 24):
            found = by_budget(spectra, costs, budget)
            assert sum(found.values()) * 2 <= budget
            every = itertools.product(*(range(1, len(E) + 1) for E in spectra.values()))
            within = [dict(zip(spectra, r, strict=True)) for r in every if 2 * sum(r) <= budget]
            best = max(explained(spectra, r) for r in within)
            assert explained(spectra, found) == pytest.approx(best, rel=1e-6)


def test_control_the_same_rank_everywhere_explains_less():
    spectra = {"a": torch.tensor([9.0, 8, 7]), "b": torch.tensor([1.0, 0.1, 0.1])}
    found = by_budget(spectra, {"a": 1, "b": 1}, 4)
    assert found == {"a": 3, "b": 1}
    assert explained(spectra, found) > explained(spectra, {"a": 2, "b": 2})


def test_costs_count_and_leftovers_go_to_cheaper_sites():
    spectra = {"wide": torch.tensor([10.0, 9, 8]), "narrow": torch.tensor([2.0, 1.5, 1])}
    found = by_budget(spectra, {"wide": 100, "narrow": 10}, 215)
    assert found == {"wide": 1, "narrow": 3}  # 9/100 of the wide one loses to 1.5/10 and 1/10
    assert by_budget(spectra, {"wide": 100, "narrow": 10}, 230) == {"wide": 2, "narrow": 3}


def test_every_site_keeps_one_direction_or_the_budget_is_refused():
    spectra = {"a": torch.tensor([1.0, 0]), "b": torch.tensor([0.0, 0])}
    assert by_budget(spectra, {"a": 3, "b": 4}, 7) == {"a": 1, "b": 1}
    with pytest.raises(cn.CovNormError, match=r"budget=6 .*2 sites costs 7 parameters"):
        by_budget(spectra, {"a": 3, "b": 4}, 6)


@pytest.mark.parametrize("first_good", range(6))
def test_bisection_finds_the_smallest_that_is_good(first_good):
    sizes, asked = [3, 5, 8, 13, 21, 34], []

    def good(size):
        asked.append(size)
        return size >= sizes[first_good]

    assert smallest(sizes, good) == sizes[first_good]
    assert len(asked) <= 3


def trained():
    net, data = small_digits.trained()
    return net, data, cn.collect(net, "ra", data)


def test_within_a_budget_each_map_is_the_best_of_its_rank_in_output_variance():
    net, _, moments = trained()
    ranks = ranks_within(decompose_sites(net, "ra", moments), 70)
    before = {site: A.matrix().double() for site, A in net.domain("ra").maps.items()}
    cn.normalize_(net, "ra", moments, budget=70)
    cn.absorb_(net, "ra")
    assert net.num_parameters("ra")["adapter"] <= 70
    for site, A in net.domain("ra").maps.items():
        Sigma = before[site] @ moments[site].covariance @ before[site].T
        P = torch.linalg.eigh(Sigma).eigenvectors[:, -ranks[site][1] :]
        torch.testing.assert_close(
            A.matrix().double(), P @ P.T @ before[site], atol=1e-4, rtol=1e-3
        )


def test_a_budget_takes_the_place_of_other_rules():
    net, data, moments = trained()
    with pytest.raises(cn.CovNormError, match="give one of them"):
        cn.normalize_(net, "ra", moments, variance=0.9, budget=70)
    with pytest.raises(cn.CovNormError, match="variance=, budget=: each chooses the ranks"):
        cn.adapt(net, "x", data, start="ra", variance=0.9, budget=70)
    with pytest.raises(cn.CovNormError, match="one direction at each of 2 sites costs"):
        cn.adapt(net, "x", data, start="ra", budget=3)
    assert list(net.domains) == ["ra"]


def test_max_drop_finds_the_smallest_that_validates_well_enough_without_tuning():
    net, data, moments = trained()
    val = data[:5]
    goal = cn.evaluate(net, "ra", val).accuracy - 4.0
    found = cn.adapt(net, "small", data, val, start="ra", max_drop=4.0, epochs=1)
    assert found.stages["normalize"] >= goal
    size = net.num_parameters("small")["adapter"]
    strict = cn.adapt(net, "strict", data, val, start="ra", max_drop=0.0, epochs=1)
    assert strict.stages["normalize"] >= goal + 4.0
    assert net.num_parameters("strict")["adapter"] >= size
    net.copy_domain("ra", "less")  # a negative control: half of the budget is not good enough
    cn.normalize_(net, "less", moments, budget=28)
    assert size == 28 or cn.evaluate(net, "less", val).accuracy < goal


def test_max_drop_needs_validation_and_leaves_the_domain_alone_when_it_fails():
    net, data, _ = trained()
    with pytest.raises(cn.CovNormError, match="needs validation data"):
        cn.adapt(net, "x", data, start="ra", max_drop=1.0)
    with pytest.raises(cn.CovNormError, match="points of accuracy"):
        cn.adapt(net, "x", data, data, start="ra", max_drop=-1.0)
    assert list(net.domains) == ["ra"]


@pytest.mark.parametrize("training", [{}, {"training": "default"}], ids=["auto", "fixed"])
def test_test_data_are_measured_at_every_stage_and_decide_nothing(training):
    data, test = small_digits.batches(60, 20), small_digits.batches(40, 20, start=300)
    files = []
    for given in (None, test):
        net = cn.MultiDomainNetwork(small_digits.backbone())
        found = cn.adapt(
            net, "d", data, data[:1], variance=0.9, epochs=2, classes=10, test=given, **training
        )
        files.append(small_digits.state(net, "d"))
        if given:
            stages = {"train", "normalize", "tune", "final"}
            assert set(found.tested) == (stages if training else {"linear", *stages})
            assert found.tested["final"] == cn.evaluate(net, "d", test).accuracy
            assert set(found.moments) == set(net.sites)
        else:
            assert found.tested == {}
    assert small_digits.same(*files)


def test_frozen_norms_keep_the_backbones_statistics_and_train_scale_and_shift():
    data = small_digits.batches(60, 20)
    for statistics in ("frozen", "calibrated", "batch"):
        net = cn.MultiDomainNetwork(small_digits.backbone())
        given = {"epochs": 2, "norms": "own", "norm_statistics": statistics}
        cn.adapt(net, "d", data, method="ra", training="default", classes=10, **given)
        assert list(net.domain("d").norms)
        for name, norm in net.domain("d").norms.items():
            own = net.backbone.get_submodule(name)
            assert torch.equal(norm.running_mean, own.running_mean) == (statistics != "batch")
            assert not torch.equal(norm.weight, own.weight)
    with pytest.raises(cn.CovNormError, match="did you mean 'frozen'"):
        cn.Training(norm_statistics="frosen")


def test_what_was_norms_is_norm_statistics_with_a_warning():
    data, states = small_digits.batches(60, 20), []
    for given in ({"norms": "frozen"}, {"norms": "own", "norm_statistics": "frozen"}):
        net = cn.MultiDomainNetwork(small_digits.backbone())
        settings = {"method": "ra", "training": "default", "epochs": 1, "classes": 10}
        old = given["norms"] == "frozen"
        warned = pytest.warns(DeprecationWarning, match="norm_statistics='frozen'")
        with warned if old else contextlib.nullcontext():
            cn.adapt(net, "d", data, **settings, **given)
        states.append(small_digits.state(net, "d"))
    assert small_digits.same(*states)
    net = small_digits.network()
    with pytest.warns(DeprecationWarning, match="norm_statistics='frozen'"):
        cn.fit(net, "digits", data, epochs=1, norms="frozen")
    for name, norm in net.domain("digits").norms.items():
        own = net.backbone.get_submodule(name)
        assert torch.equal(norm.running_mean, own.running_mean)
    with pytest.raises(cn.CovNormError, match="did you mean 'shared'"):
        cn.adapt(net, "e", data, classes=10, norms="share")


@pytest.mark.parametrize("norms", ["shared", "sites", "own"])
def test_a_domain_trained_with_frozen_norms_counts_as_trained(norms):
    data = small_digits.batches(60, 20)
    net = cn.MultiDomainNetwork(small_digits.backbone())
    given = {"epochs": 1, "norms": norms, "norm_statistics": "frozen"}
    cn.adapt(net, "d", data, method="parallel", training="default", classes=10, **given)
    before = {s: A.matrix().clone() for s, A in net.domain("d").maps.items()}
    cn.adapt(net, "d", data, variance=1.0, epochs=0)
    for site, A in net.domain("d").maps.items():
        torch.testing.assert_close(A.matrix(), before[site], atol=1e-4, rtol=1e-3)
