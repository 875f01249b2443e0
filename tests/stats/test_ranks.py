"""How many directions are kept: the paper's rule and that of the authors' program."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_covnorm import CovNormError
from torch_covnorm.errors import at_site
from torch_covnorm.stats.ranks import by_variance, by_variance_official, check_ranks, explained

RULES = [by_variance, by_variance_official]


def spectrum(*values):
    return torch.tensor(values, dtype=torch.float64)


def smallest_above(E, t):
    """The paper's words as a loop over every i: the smallest i with r_i > t."""
    e = E.tolist()
    for i in range(1, len(e) + 1):
        if sum(e[:i]) / sum(e) > t:
            return i
    return len(e)


# Whole numbers: every sum is exact in float64, so r_i has one value whoever computes it.
spectra = st.lists(st.integers(0, 2**20), min_size=1, max_size=40).filter(any)
spectra = spectra.map(lambda values: spectrum(*sorted(values, reverse=True)))
thresholds = st.floats(0, 1, exclude_min=True, exclude_max=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(E=spectra, t=thresholds)
def test_the_paper_keeps_the_smallest_i_whose_share_exceeds_t(E, t):
    assert by_variance(E, t) == smallest_above(E, t)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(E=spectra, data=st.data())
def test_a_share_that_equals_t_exactly_is_not_enough(E, data):
    i = data.draw(st.integers(1, len(E)))
    t = sum(E.tolist()[:i]) / sum(E.tolist())
    if 0 < t < 1:
        k = by_variance(E, t)
        assert k == smallest_above(E, t)
        assert k > i


@pytest.mark.parametrize(
    ("E", "t", "k"),
    [
        (spectrum(1, 1, 1, 1), 0.5, 3),
        (spectrum(1, 1, 1, 1), 0.5 - 1e-12, 2),
        (spectrum(1, 1, 1, 1), 0.5 + 1e-12, 3),
        (spectrum(2, 1, 1), 0.75, 3),
        (spectrum(98, 1, 1), 0.99, 3),
        (spectrum(98, 1.5, 0.5), 0.99, 2),
        (spectrum(5, 0, 0), 0.99, 1),
        (spectrum(7), 0.99, 1),
    ],
)
def test_the_rule_on_spectra_done_by_hand(E, t, k):
    assert by_variance(E, t) == k
    assert by_variance(E.float(), t) == k


@pytest.mark.parametrize("E", [spectrum(4, 2, 1), spectrum(4, 0, 0), spectrum(0, 0), spectrum(3)])
def test_t_of_one_keeps_every_direction(E):
    assert by_variance(E, 1.0) == len(E)
    assert by_variance(E, 1) == len(E)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(E=spectra, a=thresholds, b=thresholds, log_scale=st.integers(-60, 60))
def test_ranks_grow_with_t_stay_within_d_and_ignore_the_scale(E, a, b, log_scale):
    for rule in RULES:
        low, high = rule(E, min(a, b)), rule(E, max(a, b))
        assert 1 <= low <= high <= len(E)
        assert rule(E * 2.0**log_scale, a) == rule(E, a)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("d", [1, 2, 5])
def test_a_feature_that_never_varies_keeps_a_usable_rank(rule, d):
    assert 1 <= rule(torch.zeros(d), 0.99) <= d


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("t", [0, -0.1, 1.0000001, 99, float("nan"), float("inf")])
def test_a_threshold_outside_0_to_1_is_refused_with_its_value(rule, t):
    for E in (spectrum(3, 2, 1), torch.zeros(3)):
        with pytest.raises(CovNormError, match=f"{t}"):
            rule(E, t)


@pytest.mark.parametrize(
    ("E", "t", "k"),
    [
        (spectrum(1, 1, 1, 1, 1, 1, 1, 1), 0.99, 7),  # the 8th reaches 1: seven lie below
        (spectrum(4, 2, 1, 1), 0.75, 2),  # r = .5 .75 .875 1; one below: at least two
        (spectrum(4, 2, 1, 1), 0.875, 2),  # equal to t is not below
        (spectrum(4, 2, 1, 1), 0.9, 3),
        (spectrum(99, 1, 0), 0.5, 2),
        (spectrum(9), 0.5, 1),  # two do not exist
        (spectrum(0, 0, 0), 0.5, 2),
    ],
)
def test_the_authors_program_counts_the_shares_below_t_and_keeps_two_at_least(E, t, k):
    assert by_variance_official(E, t) == k


@settings(max_examples=200, deadline=None, derandomize=True)
@given(E=spectra, t=thresholds)
def test_the_authors_program_equals_its_loop(E, t):
    e = E.tolist()
    below = sum(sum(e[:i]) / sum(e) < t for i in range(1, len(e) + 1))
    assert by_variance_official(E, t) == min(max(below, 2), len(e))


def test_the_explained_shares_rise_to_one():
    shares = explained(spectrum(5, 3, 2))
    assert shares.tolist() == [0.5, 0.8, 1.0]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (-1, 1), (4, 1), (1, 3), (10**9, 1)])
def test_ranks_outside_1_to_d_are_refused_with_the_site(ranks):
    with pytest.raises(CovNormError, match=r"site 'features\.3': k_[xy] = "), at_site("features.3"):
        check_ranks(*ranks, 3, 2)
    check_ranks(3, 2, 3, 2)
