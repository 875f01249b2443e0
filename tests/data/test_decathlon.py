"""The Decathlon's archive: layout, labels, rules, statistics and errors.

The tests write a small archive in the published layout: `aircraft` (JPEG, one grey, one CMYK),
`svhn` (PNG, one RGBA; whole and never flipped) and `shapes`, which is none of the ten.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from test_images import two_pass

from torch_covnorm import CovNormError
from torch_covnorm.data import (
    RULES,
    Decathlon,
    Rule,
    centre_crop,
    read_image,
    resize,
    score_predictions,
    write_predictions,
)

# Category ids as in the archive: in no order, and neither from 0 nor from 1.
CATEGORIES = {
    "aircraft": {10000002: "747", 10000010: "A320", 10000001: "707"},
    "svhn": {80000002: "1", 80000001: "0"},
    "shapes": {7: "disc", 3: "square"},
}
SIZES = {"aircraft": (90, 72), "svhn": (72, 72), "shapes": (100, 150)}  # (w, h)
COUNTS = {"train": 6, "val": 3, "test": 4}


def save_image(file, name, seed, mode="RGB"):
    w, h = SIZES[name]
    pixels = np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(file)


def write_part(root, name, part, first):
    ids = list(CATEGORIES[name])
    images, annotations = [], []
    for k in range(COUNTS[part]):
        ending = "jpg" if name == "aircraft" else "png"
        mode = {(0, "jpg"): "L", (1, "jpg"): "CMYK", (0, "png"): "RGBA"}.get((k, ending), "RGB")
        file_name = f"data/{name}/{part}/{k:06d}.{ending}"
        save_image(root / file_name, name, first + k, mode)
        images.append({"id": first + k, "file_name": file_name, "width": 0, "height": 0})
        category = ids[k % len(ids)]
        annotations.append({"id": first + k, "image_id": first + k, "category_id": category})
    data = {"info": {}, "images": images, "annotations": annotations[::-1]}
    data["categories"] = [{"id": c, "name": n} for c, n in CATEGORIES[name].items()]
    if part == "test":
        (root / f"{name}_test.json").write_text(json.dumps(data))  # the labels, for scoring
        del data["annotations"]
    ending = "test_stripped" if part == "test" else part
    (root / "annotations" / f"{name}_{ending}.json").write_text(json.dumps(data))


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("above") / "decathlon-1.0"
    (root / "annotations").mkdir(parents=True)
    for name, first in (("aircraft", 10200001), ("svhn", 80200001), ("shapes", 100)):
        for part, offset in (("train", 0), ("val", 10), ("test", 20)):
            write_part(root, name, part, first + offset)
    return root


@pytest.fixture
def root(original, tmp_path):
    """A copy of the archive that a test may damage."""
    return shutil.copytree(original, tmp_path / "decathlon-1.0")


def change(root, name, part, edit):
    file = root / "annotations" / f"{name}_{part}.json"
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))
    return file


def raw(root, name, part, k):
    ending = "jpg" if name == "aircraft" else "png"
    return read_image(root / "data" / name / part / f"{k:06d}.{ending}")


# ── layout ──────────────────────────────────────────────────────────────────────────────────────


def test_the_archive_is_found_from_its_folder_from_above_and_from_its_data(original, tmp_path):
    for place in (original, original.parent, original / "data", str(original)):
        archive = Decathlon(place)
        assert archive.root == original
        assert archive.datasets == ["aircraft", "svhn", "shapes"]
        assert len(archive.split("svhn", "val")) == 3
    with pytest.raises(CovNormError, match="annotations"):
        Decathlon(tmp_path)
    with pytest.raises(CovNormError, match="nowhere"):
        Decathlon(tmp_path / "nowhere")


def test_a_renamed_archive_is_found_from_above_where_it_is_the_only_one(root):
    renamed = root.rename(root.parent / "vdd")
    assert Decathlon(root.parent).root == renamed
    shutil.copytree(renamed, root.parent / "other")
    with pytest.raises(CovNormError, match="annotations"):
        Decathlon(root.parent)


def test_images_unpacked_beside_the_annotations_are_found(root):
    for folder in list((root / "data").iterdir()):
        folder.rename(root / folder.name)
    image, label = Decathlon(root).split("svhn", "train")[0]
    assert image.shape == (3, 72, 72)
    assert label == 1


def test_labels_are_indices_of_sorted_category_ids(original):
    archive = Decathlon(original)
    assert archive.classes("aircraft") == ["707", "747", "A320"]
    assert archive.classes("svhn") == ["0", "1"]
    split = archive.split("aircraft", "train")
    assert split.categories == [10000001, 10000002, 10000010]
    assert split.classes == archive.classes("aircraft")
    # Written as 747, A320, 707, 747, …, and the annotations are in reverse order.
    assert split.labels == [1, 2, 0, 1, 2, 0]
    assert [split[i][1] for i in range(6)] == split.labels
    assert archive.split("aircraft", "val").labels == [1, 2, 0]


def test_val_has_the_labels_of_train_where_it_lacks_a_class(root):
    """Subtracting each part's smallest id, as the authors do, would shift the labels here."""

    def drop_first_class(data):
        data["annotations"] = [a for a in data["annotations"] if a["category_id"] != 10000001]
        kept = {a["image_id"] for a in data["annotations"]}
        data["images"] = [i for i in data["images"] if i["id"] in kept]

    change(root, "aircraft", "val", drop_first_class)
    assert Decathlon(root).split("aircraft", "val").labels == [1, 2]


def test_without_a_list_of_categories_those_of_the_training_part_count(root):
    change(root, "svhn", "train", lambda d: d.pop("categories"))
    change(root, "svhn", "val", lambda d: d.pop("categories"))
    archive = Decathlon(root)
    assert archive.classes("svhn") == ["80000001", "80000002"]
    assert archive.split("svhn", "val").labels == [1, 0, 1]


def test_test_yields_images_and_their_ids_for_a_predictions_file(original, tmp_path):
    split = Decathlon(original).split("svhn", "test")
    assert split.labels is None
    assert split.image_ids == [80200021, 80200022, 80200023, 80200024]
    assert [split[i][1] for i in range(4)] == split.image_ids
    (_, ids), *rest = split.loader()
    assert not rest
    file = write_predictions(tmp_path / "svhn.json", ids, [1, 0, 1, 1], split.categories)
    assert score_predictions(file, original / "svhn_test.json") == 75.0


# ── images ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_images_are_rgb_floats_normalised_by_the_training_images(part, original):
    archive = Decathlon(original)
    for name in archive.datasets:
        split = archive.split(name, part, augment=False)
        size = 72 if name == "svhn" else 64
        mean, std = (torch.tensor(v)[:, None, None] for v in archive.statistics(name))
        for k in range(len(split)):
            image, _ = split[k]
            assert image.dtype == torch.float32
            expected = centre_crop(resize(raw(original, name, part, k), 72), size)
            torch.testing.assert_close(image, (expected / 255 - mean) / std)


def windows(image, size):
    """Every crop of an image, and its mirror image."""
    for t in range(image.shape[1] - size + 1):
        for k in range(image.shape[2] - size + 1):
            crop = image[:, t : t + size, k : k + size]
            yield t, k, crop
            yield t, k, crop.flip(-1)


@pytest.mark.parametrize("name", ["aircraft", "shapes"])
def test_training_takes_random_crops_of_64_and_flips(name, original):
    split = Decathlon(original, {name: {"mean": [0] * 3, "std": [1] * 3}}).split(name, "train")
    whole = resize(raw(original, name, "train", 2), 72)
    corners = {}
    for t, k, crop in windows(whole, 64):
        key = tuple(crop[:, 0].flatten().tolist())
        corners[key] = (t, k, torch.equal(crop, whole[:, t : t + 64, k : k + 64]))
    seen = set()
    for _ in range(60):
        image = (split[2][0] * 255).round().to(torch.uint8)
        assert image.shape == (3, 64, 64)
        seen.add(corners[tuple(image[:, 0].flatten().tolist())])
    assert len({(t, k) for t, k, _ in seen}) > 30
    assert {straight for _, _, straight in seen} == {True, False}


@pytest.mark.parametrize("name", ["gtsrb", "omniglot", "svhn"])
def test_signs_letters_and_digits_are_whole_and_never_flipped(name, root):
    for file in list((root / "annotations").glob("svhn_*")):
        file.rename(file.with_name(file.name.replace("svhn", name)))
    split = Decathlon(root).split(name, "train")
    plain = Decathlon(root).split(name, "train", augment=False)
    for k in range(6):
        assert split[k][0].shape == (3, 72, 72)
        assert all(torch.equal(split[k][0], plain[k][0]) for _ in range(8))
    assert RULES.keys() == {"gtsrb", "omniglot", "svhn"}


def test_val_and_unaugmented_train_are_the_same_every_time(original):
    archive = Decathlon(original)
    for split in (
        archive.split("aircraft", "val"),
        archive.split("aircraft", "train", augment=False),
    ):
        assert all(torch.equal(split[1][0], split[1][0]) for _ in range(5))
    varied = archive.split("aircraft", "val", augment=True)
    assert any(not torch.equal(varied[1][0], varied[1][0]) for _ in range(5))


def test_another_rule_may_be_given(original):
    rule = Rule(resize=40, crop=32, flip=False)
    assert Decathlon(original).split("svhn", "val", rule=rule)[0][0].shape == (3, 32, 32)


def test_loaders_have_batches_of_128_and_shuffle_what_is_augmented(original):
    archive = Decathlon(original)
    train, val = archive.split("svhn", "train"), archive.split("svhn", "val")
    assert train.loader().batch_size == 128
    (images, labels), *rest = val.loader()
    assert not rest
    assert images.shape == (3, 3, 72, 72)
    assert labels.tolist() == val.labels
    assert labels.dtype == torch.int64
    orders = {tuple(next(iter(train.loader()))[0][:, 0, 0, 0].tolist()) for _ in range(6)}
    assert len(orders) > 1
    assert [len(y) for _, y in train.loader(batch_size=4, drop_last=True)] == [4]
    backwards = train.loader(sampler=[5, 4, 3, 2, 1, 0])
    assert next(iter(backwards))[1].tolist() == train.labels[::-1]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_seed_decides_what_a_loader_gives(workers, original):
    split = Decathlon(original).split("aircraft", "train")

    def epoch(seed):
        torch.manual_seed(seed)
        return torch.cat([x for x, _ in split.loader(batch_size=2, num_workers=workers)])

    first = epoch(1)
    assert torch.equal(epoch(1), first)
    assert not torch.equal(epoch(2), first)


# ── statistics ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["aircraft", "svhn", "shapes"])
def test_statistics_are_those_of_only_the_resized_training_images(name, original):
    got = Decathlon(original).statistics(name)
    images = [resize(raw(original, name, "train", k), 72) for k in range(6)]
    np.testing.assert_allclose(got, two_pass(images), rtol=1e-12)
    more = images + [resize(raw(original, name, "val", k), 72) for k in range(3)]
    assert np.abs(np.array(got) - two_pass(more)).max() > 1e-6


def test_statistics_are_computed_once_and_kept_as_json(root, tmp_path):
    cache = tmp_path / "new" / "statistics.json"
    archive = Decathlon(root, cache)
    assert not cache.exists()  # nothing is computed before it is needed
    svhn, shapes = archive.statistics("svhn"), archive.statistics("shapes")
    assert json.loads(cache.read_text()).keys() == {"svhn", "shapes"}
    assert [f.name for f in cache.parent.iterdir()] == ["statistics.json"]
    shutil.rmtree(root / "data")  # now they cannot be computed again
    assert archive.statistics("svhn") == svhn
    again = Decathlon(root, str(cache))
    assert (again.statistics("svhn"), again.statistics("shapes")) == (svhn, shapes)
    with pytest.raises(CovNormError, match="aircraft"):
        again.statistics("aircraft")


def test_given_statistics_are_used(original):
    mine = {"svhn": {"mean": [0.5, 0.25, 0], "std": [0.5, 1, 2]}}
    image, _ = Decathlon(original, mine).split("svhn", "val")[1]
    expected = raw(original, "svhn", "val", 1) / 255
    for c, (m, s) in enumerate([(0.5, 0.5), (0.25, 1), (0, 2)]):
        torch.testing.assert_close(image[c], (expected[c] - m) / s)


def test_other_bad_statistics_are_refused(root, tmp_path):
    with pytest.raises(CovNormError, match=r"'shape'.*did you mean 'shapes'"):
        Decathlon(root, {"shape": {"mean": [0] * 3, "std": [1] * 3}})
    Decathlon(
        root, {"dtd": {"mean": [0] * 3, "std": [1] * 3}}
    )  # one of the ten, but not in this archive
    for text in ("[]", "{", "3", '{"svhn": null}', '{"svhn": {"mean": [0, 0, 0]}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(CovNormError, match=r"bad\.json"):
            Decathlon(root, tmp_path / "bad.json")
    for file in (root / "data" / "svhn" / "train").iterdir():
        Image.new("RGB", (72, 72), (0, 9, 9)).save(file)
    with pytest.raises(CovNormError, match=r"'svhn'.*never varies"):
        Decathlon(root).split("svhn", "val")


# ── the published archive ───────────────────────────────────────────────────────────────────────


def test_differences_are_listed_and_the_published_sizes_have_none(root, monkeypatch):
    archive = Decathlon(root)
    differences = archive.differences()
    assert "shapes: not one of the ten datasets" in differences
    assert "svhn: 2 classes, published 10" in differences
    assert "svhn: 6 train images, published 47217" in differences
    assert "svhn: 4 test images, published 26032" in differences
    assert "dtd: no dtd_val.json" in differences
    small = {"aircraft": (3, 6, 3, 4), "svhn": (2, 6, 3, 4), "shapes": (2, 6, 3, 4)}
    monkeypatch.setattr("torch_covnorm.data.decathlon.PUBLISHED", small)
    assert archive.differences() == []
    change(root, "svhn", "val", lambda d: (d["images"].pop(0), d["annotations"].pop()))
    assert archive.differences() == ["svhn: 2 val images, published 3"]


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


def test_unknown_names_suggest_the_nearest(original):
    archive = Decathlon(original)
    for call in (archive.classes, archive.statistics, lambda n: archive.split(n, "val")):
        with pytest.raises(CovNormError, match=r"'aircaft'.*did you mean 'aircraft'"):
            call("aircaft")
        with pytest.raises(CovNormError, match="no dataset"):
            call("../annotations/svhn")
    with pytest.raises(CovNormError, match=r"'vall'.*did you mean 'val'"):
        archive.split("svhn", "vall")


def test_a_missing_annotation_file_is_named(root):
    with pytest.raises(CovNormError, match=r"dtd_train\.json: is missing\..*devkit"):
        Decathlon(root).split("dtd", "train")
    (root / "annotations" / "svhn_val.json").unlink()
    with pytest.raises(CovNormError, match=r"svhn_val\.json: is missing"):
        Decathlon(root).split("svhn", "val")


@pytest.mark.slow
def test_a_missing_or_damaged_image_is_named(root):
    split = Decathlon(root).split("svhn", "val")
    (root / "data/svhn/val/000001.png").unlink()
    (root / "data/svhn/val/000002.png").write_bytes(b"\x89PNG")
    assert split[0][0].shape == (3, 72, 72)
    with pytest.raises(CovNormError, match=r"svhn/val/000001\.png: no such image"):
        split[1]
    with pytest.raises(CovNormError, match=r"svhn/val/000002\.png: not an image"):
        split[2]
    with pytest.raises(CovNormError, match=r"000001\.png"):  # from a worker, too
        list(split.loader(num_workers=1))


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "data/../../secret.png", "/etc/secret.png", "C:\\secret.png", "a\\..\\b", ""],
)
@pytest.mark.parametrize("part", ["train", "val", "test_stripped"])
def test_a_file_name_outside_the_archive_is_refused(name, part, root):
    save_image(root.parent / "secret.png", "svhn", 0)
    file = change(root, "svhn", part, lambda d: d["images"][1].update(file_name=name))
    with pytest.raises(CovNormError, match=rf"{file.name}: file_name"):
        Decathlon(root).split("svhn", part.removesuffix("_stripped"))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["annotations"][0].update(image_id=5), "image 5, which is not listed"),
        (lambda d: d["annotations"].pop(), "image 80200011 has no annotation"),
        (lambda d: d.pop("annotations"), "has no annotation"),
        (lambda d: d["annotations"][0].update(category_id=9), "category 9 .*training part"),
        (lambda d: d["images"].clear() or d["annotations"].clear(), "no images"),
    ],
)
def test_annotations_that_contradict_themselves_are_refused(edit, words, root):
    change(root, "svhn", "val", edit)
    with pytest.raises(CovNormError, match=rf"svhn_val\.json: .*{words}"):
        Decathlon(root).split("svhn", "val")


def test_a_malformed_annotation_file_is_named(root):
    file = root / "annotations" / "svhn_val.json"
    for text in (b"", b'{"images": [', b"[]", b"\xff\xfe", b"null"):
        file.write_bytes(text)
        with pytest.raises(CovNormError, match=r"svhn_val\.json"):
            Decathlon(root).split("svhn", "val")
