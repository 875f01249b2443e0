"""The benchmark of the paper trains as published, whatever the library does by default."""

from __future__ import annotations

import pytest

import torch_covnorm as cn
from benchmarks.ledger import Lines
from benchmarks.paper.bench import Bench
from torch_covnorm.methods.settings import configure

OPEN = ("head", "augment", "class_weights", "keep", "recover")  # what "auto" would choose


@pytest.mark.parametrize("method", cn.METHODS)
def test_cells_train_with_fixed_settings_and_norms_of_their_own(method, tmp_path):
    bench = Bench("vgg16", Lines(tmp_path / "lines.jsonl"))
    settings = bench.settings(method, 1e-3, None, seed=3)
    given = {"training": settings.pop("training"), "tuning": settings.pop("tuning", None)}
    config = configure(method, settings, **given)
    assert config.norms == "own"
    for training in (config.training, config.tuning):
        assert {k: getattr(training, k) for k in OPEN} == {
            k: getattr(cn.Training(), k) for k in OPEN
        }
        assert isinstance(training.epochs, int)
        assert isinstance(training.lr, float)
        assert training.seed == 3
    stage = config.tuning if given["tuning"] else config.training
    assert stage.lr == 1e-3
    assert config.training.norm_statistics == ("batch" if method == "bn" else "frozen")
    if method == "piggyback":
        assert (config.training.optimizer, config.training.weight_decay) == ("adam", 0.0)
    if method in ("fnft", "lwf", "piggyback"):
        assert config.training.head_lr == 3e-3
    default = configure(method)  # a control: by default it is chosen
    assert default.training.epochs == "auto"
