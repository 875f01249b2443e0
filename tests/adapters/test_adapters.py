"""Each adapter computes the equation of its paper, for every shape of layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_covnorm.adapters import (
    KINDS,
    LowRankMap,
    Site,
    fold,
    fresh_adapter,
    infer,
    run_folded,
)

LAYERS = {
    "conv": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "strided": lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
    "dilated": lambda: nn.Conv2d(6, 8, 3, padding=2, dilation=2),
    "grouped": lambda: nn.Conv2d(6, 8, 3, padding=1, groups=2),
    "valid": lambda: nn.Conv2d(6, 8, (4, 3), stride=(1, 2)),
    "overpadded": lambda: nn.Conv2d(6, 8, 3, padding=4, padding_mode="circular"),
    "same": lambda: nn.Conv2d(6, 8, (3, 5), padding="same"),
    "linear": lambda: nn.Linear(6, 8),
}


def site(spatial: bool, own_norm: bool = True) -> Site:
    return Site("layer", spatial, 6, 8, None if own_norm else "norm")


def make(kind: str, layer: nn.Module, own_norm: bool = True, rank: int | None = None):
    at = site(isinstance(layer, nn.Conv2d), own_norm)
    adapter = fresh_adapter(kind, at, rank).eval()
    with torch.no_grad():
        for p in adapter.parameters():
            p.copy_(torch.randn_like(p))
        for norm in (adapter.B1, adapter.B2):
            if not isinstance(norm, nn.Identity):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
    return adapter


def batch(layer: nn.Module) -> Tensor:
    return torch.randn(2, 6, 9, 10) if isinstance(layer, nn.Conv2d) else torch.randn(2, 5, 6)


def by_position(A: Tensor, b: Tensor, x: Tensor, spatial: bool) -> Tensor:
    """A x + b with a plain product at every position."""
    rows = x.movedim(1, -1) if spatial else x
    out = rows @ A.T + b
    return out.movedim(-1, 1) if spatial else out


def normed(norm: nn.Module, x: Tensor, spatial: bool) -> Tensor:
    if isinstance(norm, nn.Identity):
        return x
    shape = (-1, 1, 1) if spatial else (-1,)
    mean, var, gamma, beta = (
        t.view(shape) for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    return (x - mean) / (var + norm.eps).sqrt() * gamma + beta


def under_the_centre(layer: nn.Module, x: Tensor) -> Tensor:
    """The input at the kernel's centre tap, by convolution with a kernel that has a single one."""
    if isinstance(layer, nn.Linear):
        return x
    probe = nn.Conv2d(
        6, 6, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
        bias=False, padding_mode=layer.padding_mode,
    )  # fmt: skip
    kernel = torch.zeros_like(probe.weight)
    for i in range(6):
        kernel[i, i, (kernel.shape[2] - 1) // 2, (kernel.shape[3] - 1) // 2] = 1
    probe.weight.data = kernel
    return probe(x)


@pytest.mark.parametrize("layer_name", LAYERS)
@pytest.mark.parametrize("own_norm", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_adapter_is_the_equation_of_its_paper(kind, own_norm, layer_name, monkeypatch):
    layer = LAYERS[layer_name]()
    adapter, x = make(kind, layer, own_norm), batch(layer)
    spatial = isinstance(layer, nn.Conv2d)
    z = layer(x)
    if kind == "batchnorm":
        expected = z
    else:
        A, b = adapter.A.matrix(), adapter.A.offset
        source = {
            "residual": lambda: normed(adapter.B1, z, spatial),
            "parallel": lambda: under_the_centre(layer, x),
            "conv": lambda: z,
        }[kind]()
        y = by_position(A, b, source, spatial)
        expected = y if kind == "conv" else z + y
    expected = normed(adapter.B2, expected, spatial)
    torch.testing.assert_close(adapter(layer, x), expected, rtol=1e-4, atol=1e-4)
    folded = fold([adapter], site(spatial), layer.weight)
    # Through the activations, and through the weight, which is never done for a grouped layer.
    for cheaper in (False, getattr(layer, "groups", 1) == 1):
        monkeypatch.setattr(infer, "merging_is_cheaper", lambda *_, answer=cheaper: answer)
        out = run_folded(layer, x, folded, None)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_control_a_tap_off_the_centre_is_another_function():
    layer = LAYERS["conv"]()
    adapter, x = make("parallel", layer), batch(layer)
    moved = torch.roll(x, 1, dims=3)
    wrong = adapter.B2(layer(x) + adapter.A(moved))
    assert (adapter(layer, x) - wrong).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_uses_the_batchs_own_statistics(kind):
    layer = LAYERS["conv"]()
    adapter, x = make(kind, layer), batch(layer)
    adapter.train()
    out = adapter(layer, x)
    if kind != "conv":  # B2 normalises the batch itself
        gamma, beta = (t.view(-1, 1, 1) for t in (adapter.B2.weight, adapter.B2.bias))
        assert ((out - beta) / gamma).mean((0, 2, 3)).abs().max() < 1e-4
    out.sum().backward()
    assert all(p.grad is not None for p in adapter.parameters())
    assert layer.weight.grad is not None  # the network freezes it, not the adapter


def test_a_fresh_conv_adapter_changes_nothing():
    layer = LAYERS["conv"]()
    adapter = fresh_adapter("conv", site(True))
    x = batch(layer)
    torch.testing.assert_close(adapter(layer, x), layer(x))


def test_low_rank_is_a_product_of_two_and_counts_both():
    A = LowRankMap(False, 6, 8, 3)
    x = torch.randn(4, 6)
    torch.testing.assert_close(A(x), F.linear(F.linear(x, A.W), A.C, A.bias))
    torch.testing.assert_close(A.matrix(), A.C @ A.W)
    assert A.paper_count() == 3 * (6 + 8)
