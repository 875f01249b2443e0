"""Domains stored as whole numbers with one scale per row."""

from __future__ import annotations

import pytest
import small_digits
import small_ecology as small
import torch
from command import covnorm
from domain_files import forge, tensor_file
from safetensors.torch import load_file

import torch_covnorm as cn
from torch_covnorm.ecology import Ecology
from torch_covnorm.network.files import SCALE, from_int8, rows_as_int8


def test_each_number_is_within_half_a_step_of_its_row():
    torch.manual_seed(0)
    matrix = torch.randn(7, 5, 3) * torch.logspace(-6, 3, 7)[:, None, None]
    whole, scale = rows_as_int8(matrix)
    assert whole.dtype == torch.int8
    back = from_int8({"w": whole, "w" + SCALE: scale})["w"]
    assert ((back - matrix).abs() <= 0.5001 * scale[:, None, None]).all()
    assert torch.equal(whole.flatten(1).abs().amax(1), torch.full((7,), 127, dtype=torch.int8))


def test_control_one_scale_for_all_would_lose_the_small_rows():
    matrix = torch.randn(2, 50) * torch.tensor([[1e-4], [1.0]])
    step = matrix.abs().max() / 127
    coarse = (matrix / step).round() * step
    whole, scale = rows_as_int8(matrix)
    fine = whole.float() * scale[:, None]
    assert (coarse[0] == 0).all()
    assert (fine[0] - matrix[0]).norm() < 0.01 * matrix[0].norm()


def test_rows_of_zeros_and_empty_matrices_come_back():
    whole, scale = rows_as_int8(torch.zeros(2, 3))
    assert torch.equal(from_int8({"w": whole, "w" + SCALE: scale})["w"], torch.zeros(2, 3))


@pytest.mark.slow
def test_a_domain_in_int8_is_a_third_of_float32_and_answers_nearly_alike(tmp_path):
    net, data = small_digits.trained()
    net.copy_domain("ra", "d")
    net.load_domain(net.save_domain("d", tmp_path / "d", torch.int8), "small")
    x = data[0][0]
    with torch.no_grad():
        exact, small_ = (net.eval()(x, domain=n) for n in ("d", "small"))
    assert not torch.equal(exact, small_)
    assert (exact - small_).abs().max() < 0.05 * exact.abs().max()
    stored = load_file(tensor_file(tmp_path / "d"))
    assert {v.dtype for v in stored.values()} >= {torch.int8, torch.float16}
    again = net.save_domain("small", tmp_path / "again", torch.int8)
    twice = load_file(tensor_file(again))
    for name, tensor in stored.items():  # rounding twice changes nothing
        if tensor.dtype == torch.int8:
            assert torch.equal(twice[name], tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, k: t.pop(k + SCALE),
        lambda t, k: t.pop(k),
        lambda t, k: t.update({k + SCALE: t[k + SCALE] * float("nan")}),
        lambda t, k: t.update({k + SCALE: -t[k + SCALE]}),
        lambda t, k: t.update({k + SCALE: t[k + SCALE][:1].clone()}),
        lambda t, k: t.update({k + SCALE: t[k + SCALE].double()}),
        lambda t, k: t.update({k: t[k].float()}),
        lambda t, _: t.update({"norms.1.bias" + SCALE: torch.ones(6)}),
    ],
    ids=["no scale", "no matrix", "nan", "negative", "short", "float64", "no int8", "a vector's"],
)
def test_forged_scales_are_refused(tmp_path, change):
    net = cn.MultiDomainNetwork(small_digits.backbone())
    net.add_domain("d", classes=10)
    folder = net.save_domain("d", tmp_path / "d", torch.int8)
    forge(folder, tensors=lambda tensors: change(tensors, "head.weight"))
    with pytest.raises(cn.CovNormError):
        net.load_domain(folder, "forged")
    assert list(net.domains) == ["d"]


def test_an_ecology_keeps_int8_and_measures_what_it_keeps(tmp_path):
    sizes = {}
    for dtype in ("float32", "float16", "int8"):
        ecology = Ecology.create(tmp_path / dtype, small.backbone())
        facts = small.added(ecology, "digits", "ra", dtype=dtype)
        sizes[dtype] = ecology.blobs.size(ecology.entry("digits").blobs["tensors"])
        assert facts["results"]["dtype"] == dtype
    assert sizes["float32"] > sizes["float16"]
    with pytest.raises(cn.CovNormError, match="float32, float16, int8"):
        small.config(dtype="int88")


@pytest.mark.slow
def test_the_metric_of_the_loss_goes_through_adapt_and_resumes(tmp_path):
    data = small_digits.batches(120, 20)
    states = []
    for snapshot in (None, tmp_path / "s", tmp_path / "s"):
        net = cn.MultiDomainNetwork(small_digits.backbone())
        found = cn.adapt(
            net,
            "d",
            data,
            data[:2],
            metric="loss",
            budget=80,
            epochs=2,
            classes=10,
            snapshot=snapshot,
        )
        states.append(small_digits.state(net, "d"))
        assert found.parameters["adapter"] <= 80
        assert found.predicted["loss"] > 0
        assert found.predicted["error"] > 0
    assert small_digits.same(states[0], states[1])
    assert small_digits.same(states[0], states[2])
    drop = cn.adapt(net, "e", data, data, metric="loss", max_drop=5.0, epochs=2, classes=10)
    assert drop.stages["normalize"] >= drop.stages["train"] - 5
    for wrong in ({"M": "random"}, {"preset": "paper"}, {"metric": "los"}):
        with pytest.raises(cn.CovNormError):
            cn.adapt(net, "f", data, **{"metric": "loss", "budget": 80, "classes": 10, **wrong})


def test_an_ecology_shows_what_the_compression_costs(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    facts = small.added(ecology, "digits", variance=None, metric="loss", budget=60)
    assert facts["results"]["predicted"]["loss"] >= 0
    assert ecology.details("digits")["results"]["predicted"] == facts["results"]["predicted"]
    predicted = facts["results"]["predicted"]
    line = f"by compression: {predicted['loss']:.3g} ± {predicted['error']:.2g} per image"
    shown = covnorm("show", "digits", "--ecology", tmp_path / "e").out
    assert line in " ".join(shown.split())
