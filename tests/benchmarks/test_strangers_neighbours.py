"""The neighbours that the default command is compared with: each learns an easy task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from benchmarks.strangers import cells
from benchmarks.strangers.finetune import finetune
from benchmarks.strangers.neighbour import code_lines, head_of
from benchmarks.strangers.probe import probe


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 2),
    ).eval()  # fmt: skip


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Red or blue, with noise."""
    y = torch.arange(n) % 2
    x = 0.1 * torch.randn(n, 3, 8, 8)
    x[torch.arange(n), 2 * y] += 1
    return x, y


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return (model(x).argmax(1) == y).float().mean().item()


def test_the_probe_trains_only_the_head():
    model, data = net(), images(40)
    before = [p.clone() for p in model[0].parameters()]
    linear = probe(model, head_of(model), *data)
    assert model.get_submodule(head_of(model)) is linear
    assert accuracy(model, *images(40)) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True))


@pytest.mark.slow
def test_fine_tuning_keeps_the_best_network():
    train, (x, y) = images(480), images(40)
    tuned = finetune(net, train, (x, y), epochs=6)
    assert not tuned.training
    assert accuracy(tuned, x, y) == 1
    short = finetune(net, train, (x, y), epochs=1)
    # Validation labels that say the opposite: the network that learned least is the best.
    least = finetune(net, train, (x, 1 - y), epochs=6)
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y).item() for model in (tuned, short, least)]
    assert losses[0] < 0.8 * losses[1]
    assert losses[0] < 0.8 * losses[2]


def test_fine_tuning_is_what_people_write():
    assert code_lines(finetune) <= 40
    assert code_lines(probe) < code_lines(finetune)


def test_lora_trains_factors_and_the_head(tmp_path):
    pytest.importorskip("peft")
    from benchmarks.strangers.lora import lora

    model = nn.Sequential(nn.Conv2d(3, 8, 1), *list(net())[1:]).eval()
    tuned = lora(model, head_of(model), *images(640), 10)
    assert accuracy(tuned, *images(40)) == 1
    tuned.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.fixture
def folder(tmp_path):
    """Two easy classes: 8 images of each for training, 6 for test."""
    rng = np.random.default_rng(0)
    for part, n in (("train", 8), ("test", 6)):
        for channel, label in enumerate(("blue", "red")):
            inside = tmp_path / "images" / part / label
            inside.mkdir(parents=True)
            for i in range(n):
                x = rng.integers(0, 60, (64, 64, 3), dtype=np.uint8)
                x[..., 2 * (1 - channel)] += 150
                Image.fromarray(x).save(inside / f"{i}.png")
    return tmp_path / "images"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["probe", "covnorm"])
def test_a_cell_is_run_by_a_process(method, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COVNORM_CACHE", str(tmp_path / "cache"))
    row = cells.run(method, folder, "efficientnet-lite0")
    assert (row["accuracy"], row["n"], row["correct"]) == (100, 12, "1" * 12)
    assert 0 < row["bytes"] < 1_000_000
    assert row["parameters"] >= 2 * 1281
    assert row["cpu_seconds"] > 0


@pytest.mark.slow
def test_a_failed_process_says_why(folder):
    with pytest.raises(Exception, match="no-such-net"):
        cells.run("probe", folder, "no-such-net")
