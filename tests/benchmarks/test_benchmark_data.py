"""The domains that the benchmarks make of their archives."""

import pickle

import numpy as np
import pytest
import torch
from small_archives import MAKERS, PACKS, idx, noise, picture, place, place_small, tgz

from benchmarks import domains, fetch, readers, vgg16_weights
from torch_covnorm import CovNormError

PARTS = ("train", "val", "test")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COVNORM_CACHE", str(tmp_path / "cache"))
    for part, n in zip(("TRAIN", "VAL", "TEST"), (100, 40, 80), strict=True):
        monkeypatch.setattr(domains, part, n)


def parts_of(split):
    return {p: (getattr(split, f"x_{p}"), getattr(split, f"y_{p}")) for p in PARTS}


def images(x):
    return [image.numpy().tobytes() for image in x]


# ── readers ─────────────────────────────────────────────────────────────────────────────────────


def test_idx_files():
    values = np.arange(24).reshape(2, 3, 4)
    assert (readers.idx(idx(values)) == values).all()
    with pytest.raises(CovNormError, match="not an idx file of bytes"):
        readers.idx(b"\0\0\x0d\x01" + bytes(8))


def test_an_image_counts_once_and_under_two_labels_not_at_all():
    rng = np.random.default_rng(0)
    a, b, c = (noise(rng, 0, 4, 4) for _ in range(3))
    found = readers.pool([(a, 0), (b, 1), (a, 0), (c, 0), (c, 1)])
    assert sorted(label for _, label in found.values()) == [0, 1]
    assert {image.tobytes() for image, _ in found.values()} == {a.tobytes(), b.tobytes()}


def test_the_order_of_the_files_does_not_matter():
    rng = np.random.default_rng(0)
    pairs = [(noise(rng, i % 3, 4, 4), i % 3) for i in range(30)]
    first, again = readers.pool(pairs), readers.pool(pairs[::-1])
    assert list(first) == list(again)
    quota = dict.fromkeys(range(3), 4)
    assert list(readers.take(first, quota)) == list(readers.take(again, quota))


def test_pixels_of_objects_stay_where_they_were(monkeypatch):
    """Red above, blue below, one image a row of a batch."""
    image = np.zeros((32, 32, 3), np.uint8)
    image[:16, :, 0], image[16:, :, 2] = 250, 120
    files = MAKERS["objects"](np.random.default_rng(0))
    files["test_batch.png"] = picture(image.reshape(1, 1024, 3))
    files["test_lables.json"] = b"[7]"
    _, test = readers.objects(files)
    ((found, label),) = test.values()
    assert label == 7
    assert (found == image).all()


def test_large_images_shrink_by_averaging():
    """A fine chessboard becomes grey. Control: every fifth pixel of it is black or white."""
    board = (255 * (np.indices((300, 300)).sum(0) % 2)).astype(np.uint8)
    grey = readers._pixels(picture(board), 64).astype(int)
    assert grey.shape == (64, 64)
    assert abs(grey - 127).max() < 20
    assert abs(board[::5, ::5].astype(int) - 127).min() > 100


def test_a_vgg16_checkpoint_that_runs_code_is_refused():
    with pytest.raises(pickle.UnpicklingError, match="is not a numpy array"):
        vgg16_weights._convert(pickle.dumps({"VGG16_0": print}))


# ── domains ─────────────────────────────────────────────────────────────────────────────────────

SIZES = {  # train, val, test and the side, from the archives of small_archives with 100, 40, 80
    "objects": (100, 40, 80, 32),
    "products": (100, 40, 80, 28),
    "digits": (100, 40, 80, 28),
    "sketches": (100, 40, 80, 32),
    "drawings": (96, 18, 47, 64),
    "solar": (100, 20, 50, 64),
    "faces": (80, 40, 80, 64),
}


@pytest.mark.parametrize("name", domains.DOMAINS)
@pytest.mark.slow
def test_a_domain_in_three_parts(name, monkeypatch):
    place_small(monkeypatch, name)
    split = domains.load(name)
    side = SIZES[name][3]
    seen = []
    for part, (x, y) in parts_of(split).items():
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert x.shape == (len(y), 3, side, side), part
        count = y.bincount(minlength=len(split.classes))
        if name not in ("drawings", "solar"):
            assert count.min() == count.max() > 0, part
        if name not in ("objects", "drawings"):
            assert (x == x[:, :1]).all()
        seen += images(x)
    assert len(set(seen)) == len(seen)  # none is in two parts, nor twice in one
    sizes = [len(y) for _, y in parts_of(split).values()]
    assert sizes == list(SIZES[name][:3])


@pytest.mark.parametrize("name", ["objects", "products", "digits"])
def test_labels_stay_with_their_images(name, monkeypatch):
    """The first pixel tells the label; and an image that is in train and test is in test alone."""
    place_small(monkeypatch, name)
    split = domains.load(name)
    for x, y in parts_of(split).values():
        assert (x[:, 0, 0, 0] == y).all()
        assert not (x[:, 0, 0, 0] == y.flip(0)).all()  # control
    train, test = readers.READERS[name](fetch.members(name))
    assert not train.keys() & test.keys()
    assert len(train) == (299 if name == "objects" else 300)
    assert len(test) == 120


def test_faces_are_squashed_and_keep_their_person(monkeypatch):
    place_small(monkeypatch, "faces")
    monkeypatch.setattr(domains, "TRAIN", 600)
    monkeypatch.setattr(domains, "TEST", 600)
    split = domains.load("faces")
    for part, n in zip(PARTS, (6, 1, 3), strict=True):
        x, y = parts_of(split)[part]
        assert y.bincount().tolist() == [n] * 40
        assert (x[:, 0, :30] == 6 * y[:, None, None]).all()
        assert (x[:, 0, 35:] % 20 == 0).all()


def test_solar_keeps_the_shares_of_its_classes(monkeypatch):
    """Of 80, 40, 20 and 60 cells."""
    place_small(monkeypatch, "solar")
    split = domains.load("solar")
    assert split.y_train.bincount().tolist() == [40, 20, 10, 30]
    assert split.y_test.bincount().tolist() == [20, 10, 5, 15]
    val = split.y_val.bincount().tolist()
    assert val == [8, 4, 2, 6]
    assert (split.x_train[:, 0, 10, 50] == 200 - 50 * split.y_train).all()


def test_drawings_without_what_is_left_out(monkeypatch):
    place_small(monkeypatch, "drawings")
    train, test = readers.drawings(fetch.members("drawings"))
    assert readers.sizes(train | test) == dict.fromkeys(range(10), 20) | {8: 8}
    split = domains.load("drawings")
    assert split.y_test.bincount().tolist() == [5] * 8 + [2, 5]
    assert split.y_train.bincount().min() > 0
    corner = split.x_train[:, :, :2, :2]
    assert (corner == 255).all()


def test_near_empty_sketches_are_left_out(monkeypatch):
    place_small(monkeypatch, "sketches")
    train, test = readers.READERS["sketches"](fetch.members("sketches"))
    assert readers.sizes(train) == dict.fromkeys(range(20), 18)
    assert readers.sizes(test) == dict.fromkeys(range(20), 5)


def test_the_first_images_are_balanced_too(monkeypatch):
    place_small(monkeypatch, "digits")
    rounds = domains.load("digits").y_train.reshape(-1, 10)
    assert (rounds.sort(1).values == torch.arange(10)).all()


@pytest.mark.parametrize("name", ["objects", "solar"])
def test_two_builds_are_equal_to_the_bit(name, tmp_path, monkeypatch):
    place_small(monkeypatch, name)
    first = domains.load(name)
    file = fetch.cache() / "domains" / f"{name}.safetensors"
    bits = file.read_bytes()
    file.unlink()
    domains.load(name)
    assert file.read_bytes() == bits
    files = MAKERS[name](np.random.default_rng(0))
    place(monkeypatch, name, dict(reversed(files.items())), PACKS.get(name, tgz))
    again = domains.load(name)  # the same in another order
    assert file.read_bytes() != bits  # it names its archive
    for part in PARTS:
        for a, b in zip(parts_of(first)[part], parts_of(again)[part], strict=True):
            assert torch.equal(a, b)


def test_the_second_load_needs_no_archive_and_a_changed_one_is_made_anew(monkeypatch):
    archive = place_small(monkeypatch, "digits")
    first = domains.load("digits")
    archive.unlink()
    assert torch.equal(domains.load("digits").x_test, first.x_test)
    place_small(monkeypatch, "digits", seed=1)
    other = domains.load("digits")
    assert not torch.equal(other.x_test, first.x_test)
    monkeypatch.setattr(domains, "TEST", 50)
    assert len(domains.load("digits").y_test) == 50
    file = fetch.cache() / "domains" / "digits.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert len(domains.load("digits").y_test) == 50
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_an_unknown_domain_is_refused_by_name():
    with pytest.raises(CovNormError, match=r"no domain 'face': did you mean 'faces'\?"):
        domains.load("face")
