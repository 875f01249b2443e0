"""Features, their moments by two passes in float64, and a naive sum as negative control."""

import torch

EXACT = 1e-12  # float64 features
# float32 features are exact data; only their centring, products and sums round, by 2^-24 = 6e-8
# each. A blocked sum passes each term through a few tens of roundings that mostly cancel, so 1e-5
# is generous for it; one running float32 sum of a million squares is not that good.
SINGLE = 1e-5


def two_pass(x):
    """Return mean and covariance of rows (n, d) in float64: first the mean, then the products."""
    x = x.double()
    mean = x.mean(0)
    centred = x - mean
    return mean, centred.T @ centred / len(x)


def naive_float32(x):
    """Compute E[x x^T] - m m^T in float32, which must not be used."""
    mean = x.mean(0)
    return mean, x.T @ x / len(x) - torch.outer(mean, mean)


def assert_moments(moments, x, tolerance):
    mean, covariance = two_pass(x)
    spread = covariance.abs().max()
    assert moments.n == len(x)
    assert (moments.mean - mean).abs().max() <= tolerance * (mean.abs().max() + spread.sqrt())
    assert (moments.covariance - covariance).abs().max() <= tolerance * spread


def assert_no_negative_variance(moments):
    e = torch.linalg.eigvalsh(moments.covariance)
    assert e[0] >= -1e-12 * e[-1].clamp(min=0)


def gaussian(n, d, mean=0.0, dtype=torch.float64, seed=0):
    """Return correlated rows; each channel has a different spread and mean."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=g, dtype=torch.float64) + torch.eye(d)
    rows = torch.randn(n, d, generator=g, dtype=torch.float64) @ mixing
    return (rows + mean + torch.arange(d)).to(dtype)


def state_of(moments):
    return {k: v.clone() for k, v in moments.state_dict().items()}


def assert_unchanged(moments, before):
    after = moments.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before)
