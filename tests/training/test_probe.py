"""The linear head on the backbone's features, and predictions of a domain."""

from __future__ import annotations

import numpy as np
import pytest
import small_digits
import small_ecology as small
import torch
from command import npz
from PIL import Image
from sklearn.linear_model import LogisticRegression

import torch_covnorm as cn
from torch_covnorm.data import load_sample
from torch_covnorm.data.loader import Batches, as_input
from torch_covnorm.ecology.prediction import preprocessing, probabilities, read_inputs
from torch_covnorm.training import probe as bare
from torch_covnorm.training.probe import _logistic, features, linear_accuracy


def test_features_are_what_the_bare_backbone_gives_its_head():
    net = cn.MultiDomainNetwork(small_digits.backbone())
    net.add_domain("other", classes=3)
    data = small_digits.batches(60, 20)
    x, y = features(net, data)
    with torch.no_grad():
        expected = net.backbone[:-1](torch.cat([b[0] for b in data]))
    torch.testing.assert_close(x, expected)
    assert torch.equal(y, torch.cat([b[1] for b in data]))
    assert len(features(net, data)[0]) == 60  # no hook of the first call is left
    with pytest.raises(cn.CovNormError, match="no head"):
        features(cn.MultiDomainNetwork(small_digits.backbone(), head=None), data)


def test_logistic_regression_is_scikit_learns():
    torch.manual_seed(0)
    x, y = torch.randn(200, 5), torch.randint(0, 3, (200,))
    x[:, 0] += y
    decay = 1e-2
    head = _logistic(x, y, 3, decay)
    # sum of losses + |w|²/2C is n times mean loss + decay |w|² at C = 1/(2 n decay)
    theirs = LogisticRegression(C=1 / (2 * len(x) * decay), tol=1e-8, max_iter=1000).fit(x, y)
    expected = theirs.predict_proba(x.numpy())
    torch.testing.assert_close(
        (x @ head[:-1] + head[-1]).softmax(1).double(), torch.tensor(expected), atol=2e-3, rtol=0
    )


def test_the_linear_head_reads_labels_and_only_the_test_part_is_scored():
    net = cn.MultiDomainNetwork(small_digits.backbone())
    data, test = small_digits.batches(300, 50), small_digits.batches(100, 50, start=400)
    right = linear_accuracy(net, 10, data, data[:2], test)
    torch.manual_seed(0)
    mixed = [(x, y[torch.randperm(len(y))]) for x, y in data]
    assert right > 30, "a random network; chance is 10"
    assert linear_accuracy(net, 10, mixed, None, test) < right - 15


def test_batches_are_inputs_in_parts_shuffled_by_torchs_random_numbers():
    sample = load_sample("digits")
    preprocessing = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    seen = []
    loader = Batches(
        sample.x_train[:70],
        sample.y_train[:70],
        preprocessing,
        32,
        progress=lambda *p: seen.append(p),
    )
    parts = list(loader)
    assert [len(x) for x, _ in parts] == [32, 32, 6]
    assert len(loader) == 3
    assert seen == [(32, 70), (64, 70), (70, 70)]
    x = parts[0][0]
    expected = (sample.x_train[3, 1, 9, 9] / 255 - 0.4) / 0.3
    assert x[3, 1, 9, 9] == pytest.approx(float(expected), abs=1e-6)
    assert x.is_contiguous(memory_format=torch.channels_last)
    shuffled = Batches(sample.x_train[:70], sample.y_train[:70], preprocessing, 32, shuffle=True)
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(torch.cat([y for _, y in shuffled]))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0].sort().values, sample.y_train[:70].sort().values)


@pytest.fixture
def net():
    torch.manual_seed(0)
    result = cn.MultiDomainNetwork(cn.load_backbone("resnet26", weights="random"))
    preprocessing = {"size": 32, "mean": [0.5] * 3, "std": [0.25] * 3, "fit": "squash"}
    result.add_domain("clipart", classes=["a", "b", "c"], preprocessing=preprocessing)
    return result.eval()


def test_probabilities_are_the_softmax_of_the_network(net, tmp_path):
    images = load_sample("digits").x_test[:5]
    files = []
    for i, image in enumerate(images):
        files.append(tmp_path / f"{i}.png")
        Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy())).save(files[-1])
    x = read_inputs(net, "clipart", files)
    assert x.shape == (5, 3, 32, 32)
    assert x.dtype == torch.uint8
    result = probabilities(net, "clipart", x, batch=2)
    with torch.no_grad():
        expected = net(as_input(x, preprocessing(net, "clipart")), domain="clipart").softmax(1)
    torch.testing.assert_close(result, expected)
    net.add_domain("other", classes=3, preprocessing={"size": 8})
    with pytest.raises(cn.CovNormError, match="lacks size, mean or std"):
        probabilities(net, "other", x)


def test_prediction_sees_the_pixels_that_training_saw(tmp_path):
    from torch_covnorm.data.decode import decode
    from torch_covnorm.data.source import read_source

    source = read_source(npz(tmp_path / "d.npz"))
    data = decode(source, 64, "squash")
    part = load_sample("digits").x_test[:30]
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(cn.load_backbone("resnet26", weights="random"))
    preprocessing = {"size": 64, "mean": [0.5] * 3, "std": [0.25] * 3, "fit": "squash"}
    net.add_domain("digits", classes=10, preprocessing=preprocessing)
    for i in (0, 7):
        file = tmp_path / f"{i}.png"
        Image.fromarray(np.ascontiguousarray(part[i].permute(1, 2, 0).numpy())).save(file)
        assert torch.equal(read_inputs(net, "digits", [file])[0], data.splits["test"].x[i])


def test_ridge_regression_is_its_normal_equations(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(300, 6), torch.randint(0, 4, (300,))
    x[torch.arange(300), y] += 2
    x = x - x.mean(0)
    head = bare._ridge(x, y, 4, 0.1)
    Y = torch.eye(4)[y]
    Y, mean = Y - Y.mean(0), Y.mean(0)
    expected = torch.linalg.solve(x.T @ x / 300 + 0.1 * torch.eye(6), x.T @ Y / 300)
    torch.testing.assert_close(head, torch.cat([expected, mean[None]]), atol=1e-4, rtol=1e-3)
    assert (bare._logits(x, head).argmax(1) == y).float().mean() > 0.7
    monkeypatch.setattr(bare, "LOGISTIC_CLASSES", 5)
    net = cn.MultiDomainNetwork(small.backbone())
    images = small.decoded().splits["train"]
    data = [(images.x.float() / 255, images.y)]
    assert bare.linear_accuracy(net, 10, data, None, data) > 20
