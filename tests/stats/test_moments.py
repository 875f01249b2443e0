"""Guarantee 1: the moments of the parts are those of the whole, to the last digits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import (
    EXACT,
    SINGLE,
    assert_moments,
    assert_no_negative_variance,
    assert_unchanged,
    gaussian,
    naive_float32,
    state_of,
    two_pass,
)

from torch_covnorm import Moments

# ── 1: any split, any order, any tree ───────────────────────────────────────────────────────────


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 120),
    d=st.integers(1, 9),
    mean=st.sampled_from([0.0, -1.0, 10.0]),
    log_scale=st.integers(-6, 6),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_any_split_in_any_order_merged_in_any_tree_equals_two_passes(
    n, d, mean, log_scale, seed, data
):
    x = gaussian(n, d, mean, seed=seed) * 10.0**log_scale
    shuffled = x[data.draw(st.permutations(range(n)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=8)))  # equal cuts: empty shards
    shards = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    forest = [Moments(d).update(shard) for shard in shards]
    while len(forest) > 1:
        a = forest.pop(data.draw(st.integers(0, len(forest) - 1)))
        b = forest.pop(data.draw(st.integers(0, len(forest) - 1)))
        forest.append(a.merge(b))
    streamed = Moments(d)
    for shard in shards:
        streamed.update(shard)
    for moments in (forest[0], streamed):
        assert_moments(moments, x, EXACT)
        assert_no_negative_variance(moments)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)])
def test_mean_10000_and_deviation_1_hold_where_the_naive_float32_sum_fails(dtype, tolerance):
    x = torch.randn(3000, 6, generator=torch.Generator().manual_seed(0)).add(1e4).to(dtype)
    whole, parts = Moments(6).update(x), Moments(6)
    for shard in x.split([0, 1, 700, 1, 1299, 999]):
        parts = parts.merge(Moments(6).update(shard))
    for moments in (whole, parts):
        assert_moments(moments, x, tolerance)
        assert_no_negative_variance(moments)
    _, reference = two_pass(x)
    _, naive = naive_float32(x.float())
    assert (naive - reference).abs().max() > 1.0, "the negative control must fail by 100 %"


@pytest.mark.parametrize(("n", "d"), [(2_000_000, 1), (300_000, 3), (5000, 40)])
def test_float32_features_keep_their_digits_over_many_rows(n, d):
    x = gaussian(n, d, mean=3.0, dtype=torch.float32)
    assert_moments(Moments(d).update(x), x, SINGLE)


def test_a_corner_that_is_dark_in_every_image_costs_no_digits():
    """A regular outlier: whatever rows an implementation looks at first, these may be they."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 4, 32, 32, generator=g) + 1e4
    x[:, :, 0, 0] = 0
    moments = Moments(4).update(x)
    assert_moments(moments, x.movedim(1, -1).reshape(-1, 4), SINGLE)
    assert_no_negative_variance(moments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_covariance_is_exactly_symmetric(dtype):
    for seed, (n, d) in enumerate([(1, 3), (40, 7), (100, 25), (255, 33), (64, 64)]):
        moments = Moments(d)
        for shard in gaussian(n, d, 3.0, dtype, seed).split(30):
            moments.update(shard)
        moments = moments.merge(Moments(d).update(gaussian(9, d, -1.0, dtype, seed + 50)))
        for m in (moments, moments.transform(torch.randn(5, d))):
            assert torch.equal(m.covariance, m.covariance.T), (n, d)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [2, 20, 400])
def test_no_eigenvalue_is_negative_where_the_rows_do_not_span_the_space(n, dtype):
    x = gaussian(n, 60, dtype=dtype)
    x[:, 30:] = x[:, :30]  # twin channels: rank at most 30 whatever n is
    moments = Moments(60).update(x)
    assert_no_negative_variance(moments)
    assert_no_negative_variance(moments.transform(gaussian(20, 60)))


def test_empty_shards_change_nothing_and_one_row_has_no_spread():
    moments = Moments(3).update(gaussian(5, 3))
    before = state_of(moments)
    moments.update(torch.empty(0, 3)).update(torch.empty(0, 3, 4, 4)).update(
        torch.empty(2, 3, 0, 4)
    )
    assert_unchanged(moments, before)
    assert_unchanged(moments.merge(Moments(3)), before)
    assert_unchanged(Moments(3).merge(moments), before)
    row = torch.tensor([[0.1, -3.0, 1e4]])
    one = Moments(3).update(row)
    assert (one.n, one.mean.tolist()) == (1, row[0].tolist())
    assert not one.covariance.any()


def test_merge_returns_new_moments_and_leaves_both_arguments_alone():
    a, b = Moments(4).update(gaussian(9, 4)), Moments(4).update(gaussian(5, 4, seed=1))
    before = state_of(a), state_of(b)
    merged = a.merge(b)
    merged.update(gaussian(3, 4))
    assert_unchanged(a, before[0])
    assert_unchanged(b, before[1])
    assert a.merge(a).n == 18


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)])
def test_every_position_of_an_image_is_a_row(dtype, tolerance):
    images = gaussian(6 * 5 * 4, 3, 2.0, dtype).reshape(6, 5, 4, 3).permute(0, 3, 1, 2)
    rows = torch.stack([image[:, i, j] for image in images for i in range(5) for j in range(4)])
    contiguous = images.contiguous()
    channels_last = images.contiguous(memory_format=torch.channels_last)
    assert contiguous.stride() != channels_last.stride()
    for x in (contiguous, channels_last, images.flip(3), contiguous.repeat(1, 1, 1, 2)[..., :4]):
        assert_moments(Moments(3).update(x), rows, tolerance)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1.0), (torch.bfloat16, 1e4)])
def test_half_precision_features_lose_nothing_beyond_their_own_rounding(dtype, scale):
    x = (gaussian(2000, 5, mean=300.0) * scale).to(dtype)
    assert_moments(Moments(5).update(x), x, SINGLE)
    images = x.reshape(20, 10, 10, 5).permute(0, 3, 1, 2)
    assert_moments(Moments(5).update(images), x, SINGLE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_whole_numbers_are_features_too(dtype):
    x = torch.randint(0, 200, (50, 2), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_moments(Moments(2).update(x), x.double(), SINGLE)


def test_autocast_and_a_low_matmul_precision_around_the_call_cost_no_digits():
    x = gaussian(500, 8, 100.0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_moments(Moments(8).update(x), x, SINGLE)
        assert (x.T @ x).dtype == torch.bfloat16, "control: autocast is on"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # bfloat16 products on CPUs that have them
    try:
        assert_moments(Moments(8).update(x), x, SINGLE)
        assert torch.get_float32_matmul_precision() == "medium", "the user's setting stays"
    finally:
        torch.set_float32_matmul_precision(before)


def test_moments_work_beside_the_new_precision_setting_of_torch():
    x = gaussian(50, 3)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert_moments(Moments(3).update(x), x, EXACT)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_moments_begun_in_inference_mode_go_on_outside_it():
    x = gaussian(50, 3)
    with torch.inference_mode():
        moments = Moments(3).update(x[:20])
    assert_moments(moments.update(x[20:]), x, EXACT)


def test_features_with_gradients_leave_no_graph_behind():
    x = gaussian(10, 3).requires_grad_()
    moments = Moments(3).update(x * 2)
    assert not moments.mean.requires_grad
    assert not moments.covariance.requires_grad
    assert x.grad is None


def test_the_state_stays_of_constant_size():
    moments = Moments(7)
    sizes = set()
    for n in (1, 10, 1000, 0, 20_000):
        moments.update(gaussian(n, 7))
        held = [v for v in vars(moments).values() if isinstance(v, torch.Tensor)]
        sizes.add(sum(t.untyped_storage().nbytes() for t in held))
        assert moments.mean.dtype == moments.covariance.dtype == torch.float64
    assert sizes == {(7 + 7 * 7) * 8}


# ── linear maps and PCA ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("e", [1, 3, 6, 9])
def test_transform_equals_the_moments_of_collected_outputs(e):
    x = gaussian(300, 6, 2.0)
    A, b = gaussian(e, 6, seed=1), gaussian(1, e, seed=2)[0]
    before = state_of(moments := Moments(6).update(x))
    assert_moments(moments.transform(A, b), x @ A.T + b, EXACT)
    assert_moments(moments.transform(A), x @ A.T, EXACT)
    assert_unchanged(moments, before)
    half = Moments(6).update(x[:100]).transform(A, b), Moments(6).update(x[100:]).transform(A, b)
    assert_moments(half[0].merge(half[1]), x @ A.T + b, EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "d"), [(500, 12), (5, 12), (3, 1), (1, 4)])
def test_pca_is_descending_orthonormal_and_rebuilds_the_covariance(n, d, dtype):
    moments = Moments(d).update(gaussian(n, d, 1.0, dtype))
    E, P = moments.pca()
    assert (E.shape, P.shape) == ((d,), (d, d))
    assert (E >= 0).all()
    assert (E.diff() <= 0).all()
    torch.testing.assert_close(P.T @ P, torch.eye(d, dtype=P.dtype), rtol=0, atol=1e-12)
    # Float32 features may hide eigenvalues as small as their rounding below zero; they become 0.
    tolerance = EXACT if dtype == torch.float64 else 1e-6
    gap = (P @ torch.diag(E) @ P.T - moments.covariance).abs().max()
    assert gap <= tolerance * moments.covariance.abs().max()


def test_pca_finds_known_axes_and_orders_them_by_variance():
    x = torch.tensor([[0.0, 3.0, 0.0], [0.0, -3.0, 0.0], [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    E, P = Moments(3).update(x).pca()
    torch.testing.assert_close(E, torch.tensor([4.5, 0.5, 0.0], dtype=E.dtype))
    torch.testing.assert_close(P.abs(), torch.eye(3, dtype=P.dtype)[:, [1, 0, 2]])


def test_pca_gives_the_same_answer_twice():
    first, second = (Moments(9).update(gaussian(40, 9, dtype=torch.float32)) for _ in range(2))
    for a, b in zip(first.pca(), second.pca(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first.pca(), first.pca(), strict=True):
        assert torch.equal(a, b)
