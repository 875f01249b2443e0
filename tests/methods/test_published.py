"""ResNet-26 with the published adapters, written out once more by hand; and what BatchNorm alone is
in the paper's words (eq. 9)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_covnorm as cn
from torch_covnorm.adapters.norms import scale_shift
from torch_covnorm.backbones import ResNet26
from torch_covnorm.network.routing import stepwise
from torch_covnorm.stats.decomposition import decompose

STAGES = ((1, 64), (2, 128), (3, 256))
CONVS = [
    ("conv1", 3, 32),
    *(
        (f"layer{stage}.{block}.conv{i}", d // 2 if (block, i) == (0, 1) else d, d)
        for stage, d in STAGES
        for block in range(4)
        for i in (1, 2)
    ),
]


class Norm:
    """Batch normalisation with copied numbers, which follows its running statistics by hand."""

    def __init__(self, norm: nn.Module) -> None:
        self.gamma, self.beta, self.mean, self.var = (
            t.detach().clone()
            for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        )
        self.eps, self.training = norm.eps, False

    def __call__(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            rows = x.movedim(1, -1).flatten(0, -2)
            mean, var = rows.mean(0), rows.var(0, correction=0)
            unbiased = var * len(rows) / (len(rows) - 1)
            self.mean, self.var = 0.9 * self.mean + 0.1 * mean, 0.9 * self.var + 0.1 * unbiased
        mean, var, gamma, beta = (t[:, None, None] for t in (mean, var, self.gamma, self.beta))
        return (x - mean) / (var + self.eps).sqrt() * gamma + beta


class Published:
    """The residual-adapter authors' ResNet-26, as their papers draw it, with a domain's numbers.

    `swapped` has A before its BN, `stem_relu` a ReLU behind the stem: what it is not.
    """

    def __init__(self, net, name, swapped=False, stem_relu=False) -> None:
        domain, frozen = net.domains[name], dict(net.backbone.named_parameters())
        self.name, self.swapped, self.stem_relu = name, swapped, stem_relu
        self.F = {conv: frozen[f"{conv}.weight"].clone() for conv, _, _ in CONVS}
        self.A = {conv: domain.adapters[conv].A.A.detach().clone() for conv, _, _ in CONVS}
        self.norms = {n: Norm(m) for n, m in domain.norms.items()}
        if name == "residual":
            self.norms |= {f"{conv}/B1": Norm(domain.adapters[conv].B1) for conv, _, _ in CONVS}
        self.head = copy.deepcopy(domain.head)

    def train(self) -> Published:
        for norm in self.norms.values():
            norm.training = True
        return self

    def adapted(self, conv: str, x: Tensor, stride: int = 1) -> Tensor:
        """A convolution with its adapter, and the net's norm behind."""
        z = F.conv2d(x, self.F[conv], stride=stride, padding=1)
        A = self.A[conv][:, :, None, None]
        if self.name == "parallel":
            h = z + F.conv2d(x, A, stride=stride)
        elif self.swapped:
            h = z + self.norms[f"{conv}/B1"](F.conv2d(z, A))
        else:
            h = z + F.conv2d(self.norms[f"{conv}/B1"](z), A)
        return self.norms[conv.replace("conv", "bn")](h)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.adapted("conv1", x)
        if self.stem_relu:
            x = x.relu()
        for stage, d in STAGES:
            for block in range(4):
                name, stride = f"layer{stage}.{block}", 2 if block == 0 else 1
                y = self.adapted(f"{name}.conv1", x, stride).relu()
                y = self.adapted(f"{name}.conv2", y)
                if stride == 2:  # the mean of 2 × 2 pixels, and as many channels of zeros
                    n, c, h, w = x.shape
                    x = x.view(n, c, h // 2, 2, w // 2, 2).mean((3, 5))
                    x = torch.cat([x, x.new_zeros(n, d - c, h // 2, w // 2)], 1)
                x = (x + y).relu()
        x = self.norms["end_bn"](x).relu().mean((2, 3))
        return self.head(x)


@pytest.fixture(scope="module")
def net() -> cn.MultiDomainNetwork:
    """In float64; the published adapters have no bias, so theirs stays zero as it starts."""
    torch.manual_seed(0)
    backbone = ResNet26(10).double()
    zoo.shake_(backbone, 0.3)
    net = cn.MultiDomainNetwork(backbone)
    for name in ("residual", "parallel"):
        domain = net.add_domain(name, 7, adapter=name, norms="own")
        zoo.shake_(domain.norms, 0.3)
        for _, adapter in domain.adapters.items():
            assert not adapter.A.bias.any()
            nn.init.normal_(adapter.A.A, std=0.5 / adapter.A.A.shape[1] ** 0.5)
            zoo.shake_(adapter.B1, 0.3)
            assert isinstance(adapter.B2, nn.Identity)  # the net's own norm, per domain
    return net.eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 3, 16, 16, dtype=torch.float64)


@pytest.mark.parametrize("name", ["residual", "parallel"])
@torch.no_grad()
@pytest.mark.slow
def test_resnet26_with_adapters_is_the_published_network(net, x, name):
    expected = Published(net, name)(x)
    assert zoo.close(net(x, domain=name), expected, 1e-9)  # folded
    with stepwise():
        assert zoo.close(net(x, domain=name), expected, 1e-9)
    with torch.enable_grad():
        assert zoo.close(net(x, domain=name), expected, 1e-9)
    both = net(x, domain=["residual", "parallel", name])
    assert zoo.close(both[2], expected[2], 1e-9)
    assert zoo.close(net.merge(name)(x), expected, 1e-9)


@pytest.mark.parametrize("name", ["residual", "parallel"])
@torch.no_grad()
def test_in_float32_it_is_the_published_network_to_the_digits_of_float32(net, x, name):
    single = copy.deepcopy(net).float()
    assert zoo.close(single(x.float(), domain=name).double(), Published(net, name)(x), 1e-5)


@pytest.mark.parametrize("name", ["residual", "parallel"])
@torch.no_grad()
def test_in_training_it_normalises_by_the_batch_and_follows_the_same_statistics(net, x, name):
    net = copy.deepcopy(net)
    bits, domain, published = zoo.backbone_bits(net), net.domains[name], Published(net, name)
    published.train()
    net.train()
    for batch in (x, 2 * x + 1):
        assert zoo.close(net(batch, domain=name), published(batch), 1e-8)
    for norm_name, by_hand in published.norms.items():
        conv, _, first = norm_name.partition("/")
        norm = domain.adapters[conv].B1 if first else domain.norms[norm_name]
        assert zoo.close(norm.running_mean, by_hand.mean, 1e-9)
        assert zoo.close(norm.running_var, by_hand.var, 1e-9)
        assert norm.num_batches_tracked == 2
    assert zoo.backbone_bits(net) == bits


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("residual", "swapped"), ("residual", "stem_relu"), ("parallel", "stem_relu")],
)
@torch.no_grad()
def test_control_another_order_or_a_further_relu_is_another_network(net, x, name, wrong):
    answers = Published(net, name, **{wrong: True})(x)
    assert not zoo.close(net(x, domain=name), answers, 0.01)
    net.train()
    try:
        trained = copy.deepcopy(net)(x, domain=name)
    finally:
        net.eval()
    assert not zoo.close(trained, Published(net, name, **{wrong: True}).train()(x), 0.01)


def test_gradients_reach_the_published_parts_and_nothing_of_the_backbone(net, x):
    net = copy.deepcopy(net).train()
    for name in ("residual", "parallel"):
        net(x, domain=name).square().sum().backward()
        for _, adapter in net.domains[name].adapters.items():
            assert adapter.A.A.grad.abs().max() > 0
        assert all(p.grad.abs().max() > 0 for p in net.domains[name].norms.parameters())
    assert all(p.grad is None for p in net.backbone.parameters())


def test_the_counts_are_the_published_ones(net):
    """Every convolution, the stem's too, has its adapter: d_out² in series, d_out · d_in beside."""
    assert list(net.sites) == [conv for conv, _, _ in CONVS]
    assert len(CONVS) == 25
    channels = sum(d for _, _, d in CONVS)
    series, parallel = net.num_parameters("residual"), net.num_parameters("parallel")
    assert series["adapter"] == sum(d * d for _, _, d in CONVS) == 689_152
    assert parallel["adapter"] == sum(d * d_in for _, d_in, d in CONVS) == 645_216
    assert parallel["norm"] == 2 * (channels + 256)
    assert series["norm"] == parallel["norm"] + 2 * channels  # B1
    assert series["head"] == parallel["head"] == 256 * 7 + 7
    convolutions = 9 * parallel["adapter"]
    backbone = ResNet26(1000)
    assert sum(p.numel() for p in backbone.parameters()) == (
        convolutions + 2 * (channels + 256) + 256 * 1000 + 1000
    )
    assert sum(m.weight.numel() for m in backbone.modules() if isinstance(m, nn.Conv2d)) == (
        convolutions
    )
    assert cn.account(net, "residual").denominators["ra"] == 689_152


# ── eq. 9: BatchNorm is CovNorm for independent features ─────────────────────────────────────


def moments_of(mean: Tensor, covariance: Tensor, n: int = 1000) -> cn.Moments:
    moments = cn.Moments(len(mean))
    moments.n, moments.mean, moments.scatter = n, mean, n * covariance
    return moments


def batch_norm(mu_x: Tensor, e_x: Tensor, mu_y: Tensor, deviation_y: Tensor) -> nn.BatchNorm1d:
    """Normalises x, then gives it the statistics of y."""
    norm = nn.BatchNorm1d(len(mu_x), eps=0.0).double().eval()
    with torch.no_grad():
        norm.running_mean.copy_(mu_x), norm.running_var.copy_(e_x)
        norm.weight.copy_(deviation_y), norm.bias.copy_(mu_y)
    return norm


def covnorm(A: Tensor, b: Tensor, x: cn.Moments, M: str = "closed-form"):
    """The factors at full rank, with the matrix and the offset that they make."""
    factors = decompose(A, x, b=b).cut(x.d, x.d, M)
    matrix = factors.C @ factors.M @ factors.W
    return factors, matrix, factors.mu_y - matrix @ factors.mu_x


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


sizes = st.integers(1, 8)
entries = st.floats(0.05, 5) | st.floats(-5, -0.05)


@settings(max_examples=60, deadline=None)
@given(st.data())
@torch.no_grad()
def test_with_independent_features_covnorm_is_batch_normalisation(data):
    """``y_i = sqrt(e_y / e_x) (x_i - mu_x) + mu_y``, the root signed as A is; M puts the
    directions in order: a permutation with signs."""
    d = data.draw(sizes)
    draw = lambda numbers: vector(*data.draw(st.lists(numbers, min_size=d, max_size=d)))  # noqa: E731
    e_x, a, mu_x, b = draw(st.floats(0.01, 10)), draw(entries), draw(entries), draw(entries)
    factors, matrix, offset = covnorm(torch.diag(a), b, moments_of(mu_x, torch.diag(e_x)))
    e_y, mu_y = a.square() * e_x, a * mu_x + b
    signed_root = a.sign() * (e_y / e_x).sqrt()
    torch.testing.assert_close(matrix, torch.diag(signed_root), rtol=1e-9, atol=1e-9)
    norm = batch_norm(mu_x, e_x, mu_y, a.sign() * e_y.sqrt())
    scale, shift = scale_shift([norm], d, e_x)
    torch.testing.assert_close(matrix.diag(), scale[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(offset, shift[0], rtol=1e-9, atol=1e-8)
    assert factors.M.abs().round(decimals=9).unique().tolist() in ([1.0], [0.0, 1.0])
    assert factors.M.abs().sum(0).allclose(torch.ones(d, dtype=torch.float64))
    assert factors.M.abs().sum(1).allclose(torch.ones(d, dtype=torch.float64))


def test_where_the_orders_of_variance_differ_M_is_the_permutation_between_them():
    """And control: eq. 4, without M, sends each feature's variance to another."""
    e_x, a, mu, b = vector(4, 2, 1), vector(0.5, -1, 3), vector(1, 2, 3), vector(0, 1, 0)
    x = moments_of(mu, torch.diag(e_x))  # e_y = 1, 2, 9: the other way round
    factors, matrix, _ = covnorm(torch.diag(a), b, x)
    expected = torch.tensor([[0.0, 0, 1], [0, -1, 0], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(factors.M, expected)
    torch.testing.assert_close(matrix, torch.diag(a))
    _, unaligned, _ = covnorm(torch.diag(a), b, x, "identity")
    assert (unaligned - torch.diag(a)).abs().max() > 0.5


def test_control_with_correlated_features_batch_normalisation_cannot_follow():
    torch.manual_seed(0)
    d, A, b = 5, torch.randn(5, 5).double(), torch.randn(5).double()
    root = torch.randn(d, d).double()
    x = moments_of(torch.randn(d).double(), root @ root.T)
    factors, matrix, offset = covnorm(A, b, x)
    torch.testing.assert_close(matrix, A, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(offset, b, rtol=1e-8, atol=1e-8)
    assert (factors.M.abs() > 0.05).sum() > d  # a rotation, no permutation
    y, Sigma = x.transform(A, b), x.covariance
    norm = batch_norm(x.mean, Sigma.diag(), y.mean, y.covariance.diag().sqrt())
    best = (A @ Sigma).diag() / Sigma.diag()  # of all scales the least-squares one
    for scale in (scale_shift([norm], d, b)[0][0].detach(), best):
        rest = A - torch.diag(scale)
        assert (rest @ Sigma @ rest.T).trace() > 0.1 * y.covariance.trace()
    diagonal = moments_of(x.mean, torch.diag(Sigma.diag()))  # what BatchNorm knows of x
    assert not torch.allclose(diagonal.transform(A, b).covariance, y.covariance, rtol=0.1)
