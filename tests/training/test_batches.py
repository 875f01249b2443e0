"""Data as people have it: whatever holds the images, every function sees the same numbers."""

from __future__ import annotations

import collections
import copy
import functools
import operator

import numpy as np
import pytest
import torch
from small_digits import digits, network, same, state
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import torch_covnorm as cn
from torch_covnorm.training.batches import BATCH, Loader, as_loader, images_of, unpack
from torch_covnorm.training.probe import features

MEAN, STD = [0.5], [0.25]


@functools.cache
def rows():
    return digits()


def whole(size=BATCH):
    """The reference: a list of (images, labels) in order."""
    x, y = rows()
    return list(zip(x.split(size), y.split(size), strict=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*rows(), strict=True))


class Rows(Dataset):
    """A map-style Dataset of dictionaries with Python numbers as labels."""

    def __len__(self):
        return len(rows()[0])

    def __getitem__(self, i):
        x, y = rows()
        return {"image": x[i], "label": int(y[i])}


class Table:
    """What Hugging Face's Dataset is to others: rows by number and column names, no base class."""

    column_names = ("pixel_values", "labels")

    def __len__(self):
        return len(rows()[0])

    def __getitem__(self, i):
        x, y = rows()
        return {"pixel_values": x[i], "labels": y[i]}


def dictionaries(images, labels):
    return [{images: x, labels: y} for x, y in whole()]


def halves():
    data = TensorDataset(*rows())
    return [Subset(data, range(25)), Subset(data, range(25, len(data)))]


HOLDERS = {
    "pixel_values, labels": lambda: dictionaries("pixel_values", "labels"),
    "image, label": lambda: dictionaries("image", "label"),
    "images, labels": lambda: dictionaries("images", "labels"),
    "a UserDict": lambda: [collections.UserDict(d) for d in dictionaries("images", "labels")],
    "lists of ints": lambda: [(x, y.tolist()) for x, y in whole()],
    "numpy labels": lambda: [(x, y.numpy()) for x, y in whole()],
    "int32 labels": lambda: [(x, y.int()) for x, y in whole()],
    "numpy images": lambda: [(x.numpy(), y.numpy()) for x, y in whole()],
    "lists of images": lambda: [(list(x), y) for x, y in whole()],
    "more than two": lambda: [(x, y, "names") for x, y in whole()],
    "a DataLoader": lambda: DataLoader(TensorDataset(*rows()), BATCH),
    "a DataLoader of dictionaries": lambda: DataLoader(Rows(), BATCH),
    "TensorDataset": lambda: TensorDataset(*rows()),
    "Subset": lambda: Subset(TensorDataset(*rows()), range(len(rows()[0]))),
    "ConcatDataset": lambda: ConcatDataset(halves()),
    "a Dataset of dictionaries": Rows,
    "IterableDataset": Stream,
    "like Hugging Face": Table,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_every_function_takes_it(holder):
    """collect, collect_gradients, evaluate, the probe: equal to the bit with plain batches."""
    data, net = HOLDERS[holder], network()
    found, wanted = (cn.evaluate(net, "digits", d) for d in (data(), whole()))
    assert found == wanted
    for name, statistics in (("collect", cn.collect), ("gradients", cn.collect_gradients)):
        found, wanted = (statistics(net, "digits", d) for d in (data(), whole()))
        for site, moments in wanted.items():
            ours, theirs = moments.state_dict(), found[site].state_dict()
            assert all(torch.equal(ours[k], theirs[k]) for k in ours), (name, site)
    found, wanted = (features(net, d) for d in (data(), whole()))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("holder", HOLDERS)
def test_fit_and_adapt_take_it(holder):
    data = HOLDERS[holder]
    net = network()
    settings = {"epochs": 1, "lr": 0.01, "schedule": "constant", "progress": False}
    cn.fit(net, "digits", data(), data(), **settings)
    done = cn.adapt(net, "others", data(), data(), method="ra", epochs=1, progress=False)
    assert done.accuracy is not None
    assert net.domain("others").width == 10  # counted from the labels
    shuffled = isinstance(getattr(as_loader(data(), shuffle=True), "sampler", None), RandomSampler)
    plain = network()
    cn.fit(plain, "digits", whole(), whole(), **settings)
    assert same(state(net), state(plain)) != shuffled


def test_a_shuffled_dataset_follows_the_seed():
    def fitted(seed):
        net = network()
        cn.fit(net, "digits", Rows(), epochs=2, seed=seed, progress=False)
        return state(net)

    assert same(fitted(1), fitted(1))
    assert not same(fitted(1), fitted(2))


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────


def as_bytes(x):
    return (x * 255).round().clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("layout", ["channels first", "channels last", "numpy"])
def test_bytes_are_normalized_with_the_preprocessing(layout):
    x = torch.randint(0, 256, (4, 3, 8, 6), dtype=torch.uint8)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    given = x if layout == "channels first" else x.permute(0, 2, 3, 1).contiguous()
    batch = {"image": given.numpy() if layout == "numpy" else given, "label": [0, 1, 2, 3]}
    images, labels = unpack(batch, {"size": 8, "mean": mean, "std": std})
    shift, scale = (torch.tensor(v)[:, None, None] for v in (mean, std))
    assert torch.allclose(images, (x / 255 - shift) / scale)
    assert labels.tolist() == [0, 1, 2, 3]


def test_floats_are_taken_as_they_are():
    x = torch.rand(2, 3, 8, 8) * 255
    assert unpack((x, [0, 1]), {"mean": MEAN, "std": STD})[0] is x


def test_the_domains_preprocessing_is_used_for_bytes_everywhere():
    net = network()
    net.domain("digits").preprocessing = {"size": 8, "mean": MEAN, "std": STD}
    net.backbone.preprocessing = net.domain("digits").preprocessing
    x, y = rows()
    small, floats = as_bytes(x), (as_bytes(x).float() / 255 - 0.5) / 0.25
    given, plain = [(small, y)], [(floats, y)]
    assert cn.evaluate(net, "digits", given) == cn.evaluate(net, "digits", plain)
    assert torch.equal(features(net, given)[0], features(net, plain)[0])
    for statistics in (cn.collect, cn.collect_gradients):
        a, b = (statistics(net, "digits", data) for data in (given, plain))
        for site in a:
            one, two = a[site].state_dict(), b[site].state_dict()
            assert all(torch.equal(one[k], two[k]) for k in one)
    other = network()
    cn.fit(other, "digits", plain, epochs=1, progress=False)
    cn.fit(net, "digits", given, epochs=1, progress=False)
    assert same(state(net), state(other))


@pytest.mark.parametrize("preprocessing", [None, {}, {"size": 8}, {"mean": None, "std": None}, "x"])
def test_bytes_without_a_known_preprocessing_are_refused_with_the_remedy(preprocessing):
    net = network()
    net.domain("digits").preprocessing = preprocessing
    x, y = rows()
    with pytest.raises(cn.CovNormError, match=r"uint8.*preprocessing=.*or make them float32"):
        cn.fit(net, "digits", [(as_bytes(x), y)], epochs=1, progress=False)


# ── refused ───────────────────────────────────────────────────────────────────────────────────


ONCE = {
    "generator": lambda: (batch for batch in whole()),
    "iterator": lambda: iter(whole()),
    "zip": lambda: zip(*rows(), strict=True),
    "map": lambda: map(tuple, whole()),
}


@pytest.mark.parametrize("kind", ONCE)
def test_what_can_be_iterated_once_is_refused_before_anything_trains(kind):
    net, before = network(), state(network())
    for train, val in ((ONCE[kind](), None), (whole(), ONCE[kind]())):
        with pytest.raises(cn.CovNormError, match=r"can be iterated only once.*give a DataLoader"):
            cn.fit(net, "digits", train, val, epochs=1, progress=False)
        with pytest.raises(cn.CovNormError, match="can be iterated only once"):
            cn.adapt(net, "others", train, val, method="ra", epochs=1, progress=False)
    assert same(state(net), before)
    assert "others" not in net.domains


def test_one_pass_may_come_from_a_generator():
    net = network()
    found = cn.collect(net, "digits", (batch for batch in whole()))
    wanted = cn.collect(net, "digits", whole())
    assert all(torch.equal(found[s].covariance, wanted[s].covariance) for s in wanted)
    assert cn.evaluate(net, "digits", iter(whole())).n == len(rows()[0])


class StartsOver:
    """A loader of another library: an iterator that starts over after its end."""

    def __iter__(self):
        self.left = whole()
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_an_iterator_that_starts_over_is_a_loader():
    net, plain = network(), network()
    cn.fit(net, "digits", StartsOver(), epochs=2, progress=False, schedule="constant")
    cn.fit(plain, "digits", whole(), epochs=2, progress=False, schedule="constant")
    assert same(state(net), state(plain))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": 1, "y": 2}, "keys 'x', 'y', but no images: name them 'pixel_values' or"),
        ({"image": torch.zeros(4, 3, 8, 8)}, "yields only images: yield"),
        (torch.zeros(4, 3, 8, 8), "yields only images"),
        ((torch.zeros(2, 3, 8, 8), ["cat", "dog"]), "are not numbers.*number the classes"),
        (([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [0, 1]), "not tensors of one shape"),
        ((["a.png", "b.png"], [0, 1]), "not tensors of one shape"),
    ],
    ids=["other keys", "no labels", "only images", "words", "unequal", "paths"],
)
def test_a_batch_that_cannot_be_read_is_an_error_with_the_remedy(batch, message):
    for run in (
        lambda net: cn.fit(net, "digits", [batch], epochs=1, progress=False),
        lambda net: cn.evaluate(net, "digits", [batch]),
    ):
        with pytest.raises(cn.CovNormError, match=message):
            run(network())


class Pictures(Dataset):
    """Images as Pillow has them: nothing makes tensors of them."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        from PIL import Image

        return Image.new("RGB", (8, 8)), i


def test_a_dataset_of_pictures_is_an_error_with_the_remedy():
    with pytest.raises(cn.CovNormError, match="make them tensors in its transform"):
        cn.fit(network(), "digits", Pictures(), epochs=1, progress=False)


def test_parts_are_counted_without_being_changed():
    images = np.zeros((5, 8, 8, 3), np.uint8)
    assert images_of({"image": images}) is images


def test_a_loader_is_wrapped_once_and_can_be_copied():
    loader = as_loader(DataLoader(TensorDataset(*rows()), BATCH))
    assert as_loader(loader) is loader
    assert operator.length_hint(loader) == 2
    assert isinstance(copy.deepcopy(loader), Loader)
    assert as_loader(None) is None
