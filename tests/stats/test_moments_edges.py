"""Guarantee 3: edges of moments work or say why; a state comes back or is refused."""

import pytest
import safetensors.torch
import torch
from rows import EXACT, assert_moments, assert_unchanged, gaussian, state_of

from torch_covnorm import CovNormError, Moments

# ── 3: edges ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "edge",
    {
        "dead channel": lambda x: x * torch.tensor([1, 0, 1, 1]),
        "constant feature": lambda x: torch.cat([x[:, :3], torch.full((len(x), 1), 0.1)], 1),
        "all constant": lambda x: torch.full_like(x, 0.1),
        "all zero": torch.zeros_like,
        "fewer rows than features": lambda x: x[:2],
        "one row": lambda x: x[:1],
        "no row": lambda x: x[:0],
        "one feature": lambda x: x[:, :1],
        "one row of one feature": lambda x: x[:1, :1],
    }.items(),
    ids=lambda pair: pair[0],
)
def test_degenerate_features_never_give_nan(edge, dtype):
    x = edge[1](gaussian(50, 4, 5.0)).to(dtype)
    moments = Moments(x.shape[1])
    for shard in x.split(20):
        moments.update(shard)
    y = moments.transform(torch.ones(2, x.shape[1]), torch.ones(2))
    for m in (moments, y):
        assert all(t.isfinite().all() for t in (m.mean, m.covariance, *m.pca()))
        # Rows of a constant are equal, so no variance may appear, nor any below zero.
        assert m.covariance.diagonal().min() >= 0
    constant = (x == x[:1]).all(0) if len(x) else torch.ones(x.shape[1], dtype=torch.bool)
    assert moments.covariance[constant].abs().sum() <= 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", [0, 3, 799])
def test_nan_or_inf_is_refused_and_nothing_is_taken_in(bad, dtype, row):
    moments = Moments(3).update(gaussian(20, 3))
    before = state_of(moments)
    x = gaussian(800, 3).to(dtype)
    x[row, 1] = bad
    with pytest.raises(CovNormError, match="NaN or Inf"):
        moments.update(x)
    with pytest.raises(CovNormError, match="NaN or Inf"):
        moments.update(x.reshape(8, 10, 10, 3).permute(0, 3, 1, 2))
    assert_unchanged(moments, before)


@pytest.mark.parametrize(
    "shape", [(4,), (4, 2), (4, 3, 5), (3, 4), (2, 4, 3, 3), (1, 3, 2, 2, 2), ()]
)
def test_wrong_shapes_are_refused_with_both_shapes_in_the_message(shape):
    moments = Moments(3)
    with pytest.raises(CovNormError) as error:
        moments.update(torch.zeros(shape))
    assert str(tuple(shape)) in str(error.value)
    assert "3" in str(error.value)
    assert moments.n == 0


@pytest.mark.parametrize("d", [0, -1])
def test_moments_of_no_feature_are_refused(d):
    with pytest.raises(CovNormError, match="at least 1"):
        Moments(d)


def test_moments_of_different_widths_do_not_merge():
    with pytest.raises(CovNormError, match=r"3.*2"):
        Moments(3).merge(Moments(2))


@pytest.mark.parametrize("A", [torch.zeros(4, 2), torch.zeros(3), torch.zeros(3, 3, 3)])
def test_a_matrix_that_does_not_fit_is_refused(A):
    with pytest.raises(CovNormError):
        Moments(3).update(gaussian(5, 3)).transform(A)


@pytest.mark.parametrize("shape", [(3,), (1,), (), (4, 1), (4, 4)])
def test_a_constant_that_does_not_fit_is_refused(shape):
    with pytest.raises(CovNormError):
        Moments(3).update(gaussian(5, 3)).transform(torch.zeros(4, 3), torch.zeros(shape))


# ── state ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [0, 1, 300])
def test_the_state_survives_safetensors_to_the_bit_and_goes_on(n, tmp_path):
    x, more = gaussian(n, 5), gaussian(20, 5, seed=1)
    moments = Moments(5).update(x)
    safetensors.torch.save_file(moments.state_dict(), tmp_path / "m.safetensors")
    loaded = Moments(5)
    loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"))
    assert_unchanged(loaded, moments.state_dict())
    assert loaded.n == n
    assert_moments(loaded.update(more), torch.cat([x, more]), EXACT)


def test_a_state_is_a_copy():
    moments = Moments(2).update(gaussian(5, 2))
    state = moments.state_dict()
    before = state_of(moments)
    for tensor in state.values():
        tensor.zero_()
    assert_unchanged(moments, before)
    other = Moments(2)
    other.load_state_dict(before)
    other.update(gaussian(5, 2))
    assert_unchanged(moments, before)


@pytest.mark.parametrize(
    "damage",
    [
        {"mean": torch.zeros(2)},
        {"scatter": torch.zeros(3)},
        {"scatter": torch.zeros(2, 2)},
        {"mean": torch.tensor([0.0, float("nan"), 0.0])},
        {"scatter": torch.full((3, 3), float("inf"))},
        {"n": torch.tensor(-1)},
        {"n": torch.tensor(float("nan"))},
        {"n": torch.tensor([1, 2])},
        {"mean": None},
        {"scatter": None},
        {"n": None},
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_taken_over(damage):
    state = Moments(3).update(gaussian(9, 3)).state_dict() | damage
    state = {k: v for k, v in state.items() if v is not None}
    moments = Moments(3).update(gaussian(5, 3))
    before = state_of(moments)
    with pytest.raises(CovNormError):
        moments.load_state_dict(state)
    assert_unchanged(moments, before)
