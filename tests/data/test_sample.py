"""The sample domains that come with the package, and their preparation for a backbone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from torch_covnorm.data import SAMPLES, load_sample, prepare
from torch_covnorm.data import sample as module
from torch_covnorm.errors import CovNormError

FOLDER = Path(module.__file__).with_name("samples")
SHAPES = {  # classes, train, test, side
    "fashion": (10, 1000, 500, 28),
    "digits": (10, 1000, 500, 28),
    "sketches": (20, 1000, 500, 32),
    "clipart": (10, 1050, 351, 64),
}


def images(x: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in x]


def test_every_file_is_a_sample_and_has_a_licence():
    assert {file.stem for file in FOLDER.glob("*.npz")} == set(SAMPLES) == set(SHAPES)
    text = (FOLDER / "LICENSES.md").read_text(encoding="utf-8")
    for name in SAMPLES:
        assert f"## {name}.npz: " in text
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5_200_000


@pytest.mark.parametrize("name", SAMPLES)
def test_shapes_and_types(name):
    classes, train, test, side = SHAPES[name]
    sample = load_sample(name)
    assert sample.x_train.shape == (train, 3, side, side)
    assert sample.x_test.shape == (test, 3, side, side)
    assert sample.y_train.shape == (train,)
    assert sample.y_test.shape == (test,)
    assert sample.x_train.dtype == sample.x_test.dtype == torch.uint8
    assert sample.y_train.dtype == sample.y_test.dtype == torch.int64
    assert sample.x_train.is_contiguous()
    assert len(set(sample.classes)) == classes
    assert all(type(word) is str and word for word in sample.classes)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_class_has_its_share_of_both_parts(name):
    sample = load_sample(name)
    for labels in (sample.y_train, sample.y_test):
        count = torch.bincount(labels, minlength=len(sample.classes))
        assert len(count) == len(sample.classes)
        if name == "clipart":  # its small folders have fewer
            assert 2 * count.min() > count.max() > count.min() > 20
        else:
            assert count.min() == count.max()


@pytest.mark.parametrize("name", SAMPLES)
def test_no_image_is_there_twice(name):
    sample = load_sample(name)
    both = images(sample.x_train) + images(sample.x_test)
    assert len(set(both)) == len(both)
    assert len({*both, *images(sample.x_test[:3])}) == len(both)  # control: copies would be noticed


@pytest.mark.parametrize("name", SAMPLES)
def test_the_first_images_are_balanced_too(name):
    sample = load_sample(name)
    for labels in (sample.y_train, sample.y_test):
        rounds = labels[: 10 * len(sample.classes)].reshape(10, -1)
        assert (rounds.sort(1).values == torch.arange(len(sample.classes))).all()
        assert not (rounds == rounds[0]).all()  # the rounds differ in order


@pytest.mark.parametrize("name", SAMPLES)
def test_the_file_holds_no_pickle(name):
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    assert set(arrays) == {"x_train", "y_train", "x_test", "y_test", "classes"}
    assert {array.dtype.kind for array in arrays.values()} == {"u", "U"}


@pytest.mark.parametrize("name", ["sketches", "clipart"])
def test_drawings_are_centred_on_white(name):
    """There are two pixels of margin, and the drawing is centred."""
    x = load_sample(name).x_train
    side = x.shape[-1]
    inside = torch.zeros(side, side, dtype=torch.bool)
    inside[2:-2, 2:-2] = True
    assert (x[..., ~inside] == 255).all()
    drawn = (x < 250).any(1)
    assert drawn.flatten(1).any(1).all()  # none is empty
    for along in (drawn.any(1).float(), drawn.any(2).float()):
        before, after = along.argmax(1), along.flip(1).argmax(1)
        assert ((before - after).abs() <= 2).float().mean() > 0.98


def test_labels_fit_the_images():
    """Facts that another order of the classes would break: ink and height."""
    digits, fashion, sketches = (load_sample(name) for name in ("digits", "fashion", "sketches"))
    ink = [digits.x_train[digits.y_train == i].float().mean().item() for i in range(10)]
    assert digits.classes[ink.index(min(ink))] == "1"
    assert digits.classes[ink.index(max(ink))] == "0"

    def upper_half(word: str) -> float:
        x = fashion.x_train[fashion.y_train == fashion.classes.index(word)].float()
        return (x[:, :, :10].sum() / x.sum()).item()

    shoes = {"Sandal", "Sneaker", "Ankle boot"}
    assert set(sorted(fashion.classes, key=upper_half)[:2]) < shoes

    def height(word: str) -> float:
        x = sketches.x_train[sketches.y_train == sketches.classes.index(word), 0]
        return (x < 128).any(2).sum(1).float().mean().item()

    ranked = sorted(sketches.classes, key=height)
    assert ranked[0] == "eyeglasses"
    assert set(ranked[-4:]) >= {"ice cream", "flower"}


def test_an_unknown_sample_is_refused_by_name():
    with pytest.raises(CovNormError, match=r"no sample 'sketch': did you mean 'sketches'\?"):
        load_sample("sketch")
    with pytest.raises(CovNormError, match="choose one of: clipart, digits, fashion, sketches"):
        load_sample("../zzz")


def test_prepare_by_hand():
    x = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    x[0, 0] = torch.tensor([[0, 51], [102, 255]])
    x[0, 1] = 255
    out = prepare(x, 2, mean=(0.2, 0.5, 0.0), std=(0.1, 0.25, 1.0))
    expected = torch.tensor([[[-2.0, 0.0], [2.0, 8.0]], [[2.0, 2.0], [2.0, 2.0]], [[0, 0], [0, 0]]])
    torch.testing.assert_close(out[0], expected)
    assert out.dtype == torch.float32
    torch.testing.assert_close(prepare(x, 2, 0.5, 0.5), x.float() / 127.5 - 1)


def test_prepare_grows_bilinearly():
    """2 → 4 pixels: centres at −¼, ¼, ¾, 1¼ of the old grid, the ends clamped."""
    x = torch.tensor([0, 100], dtype=torch.uint8).expand(1, 3, 2, 2)
    out = 255 * prepare(x, 4, 0.0, 1.0)
    row = torch.tensor([0.0, 25.0, 75.0, 100.0])
    torch.testing.assert_close(out, row.expand(1, 3, 4, 4))


def test_prepare_shrinks_by_averaging():
    """A fine chessboard becomes grey. Control: without antialiasing a third of it aliases away."""
    rows, columns = torch.meshgrid(torch.arange(30), torch.arange(30), indexing="ij")
    board = (255 * ((rows + columns) % 2)).to(torch.uint8).expand(1, 3, 30, 30)
    grey = prepare(board, 10, 0.0, 1.0)
    assert (grey - 0.5).abs().max() < 0.06
    naive = torch.nn.functional.interpolate(board / 255.0, size=(10, 10), mode="bilinear")
    assert (naive - 0.5).abs().max() > 0.4


def test_prepare_gives_the_layout_that_is_asked():
    x = load_sample("digits").x_test[:2]
    plain = prepare(x, 32, 0.5, 0.5)
    last = prepare(x, 32, 0.5, 0.5, channels_last=True)
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    assert torch.equal(plain, last)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 4, 4), torch.float32), ((4, 3, 4), torch.uint8), ((2, 1, 4, 4), torch.uint8)],
)
def test_prepare_refuses_other_types_and_shapes(shape, dtype):
    with pytest.raises(CovNormError, match=r"must be uint8 \(n, 3, h, w\)"):
        prepare(torch.zeros(shape, dtype=dtype), 8, 0.5, 0.5)
