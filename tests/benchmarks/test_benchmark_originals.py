"""The paper's own data from a folder: image folders, and the Decathlon's archive."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_archives import place_small

pytest.importorskip("matplotlib")  # the table at the end comes from the page

from benchmarks import domains, ledger, originals
from benchmarks.ledger import Lines
from benchmarks.paper import __main__ as paper
from benchmarks.paper import pretraining, profiles, table2
from benchmarks.paper.bench import Bench
from torch_covnorm import CovNormError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("COVNORM_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(folder, counts):
    rng = np.random.default_rng(len(str(folder)))
    for label, (name, n) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            image = np.full((40, 50, 3), 40 * label, np.uint8)
            image[30:] = rng.integers(0, 255, 3)
            Image.fromarray(image).save(folder / name / f"{i}.png")


def test_image_folders_take_the_place_of_the_domains(tmp_path, capsys):
    root = tmp_path / "originals"
    write(root / "svhn", {"0": 20, "1": 20, "2": 20})
    write(root / "FLOWERS" / "train", {"daisy": 12, "rose": 12})
    write(root / "FLOWERS" / "test", {"daisy": 4, "rose": 5})
    write(root / "elsewhere", {"a": 3})
    assert originals.names(root) == ("Flowers", "SVHN")
    split = originals.load("SVHN", root)
    assert split.classes == ("0", "1", "2")
    assert split.x_train.shape == (39, 3, 64, 64)
    assert Counter(split.y_test.tolist()) == {0: 5, 1: 5, 2: 5}
    assert Counter(split.y_val.tolist()) == {0: 2, 1: 2, 2: 2}
    for part in domains.PARTS:
        x, y = getattr(split, f"x_{part}"), getattr(split, f"y_{part}")
        assert (x[:, 0, 5, 5] == 40 * y).all()
    flowers = originals.load("Flowers", root)
    assert Counter(flowers.y_test.tolist()) == {0: 4, 1: 5}
    assert len(flowers.y_val) == 4
    assert capsys.readouterr().out == ""
    shutil.copy(root / "FLOWERS/train/daisy/0.png", root / "FLOWERS/test/daisy/0.png")
    (root / "FLOWERS/notes.txt").write_text("")
    originals.load("Flowers", root)
    told = capsys.readouterr().out
    assert "Flowers: 1 images are in two parts" in told
    assert "Flowers: ignored: files beside the class folders (1)" in told


def test_the_source_of_a_pre_training_is_ours_with_a_folder_too(tmp_path, monkeypatch):
    place_small(monkeypatch, "objects")
    write(tmp_path / "Flowers", {"daisy": 20, "rose": 20})
    bench = Bench("resnet26", Lines("nothing"), tmp_path)
    assert bench.domains == ("Flowers",)
    assert bench.data("Flowers").classes == ("daisy", "rose")
    assert torch.equal(bench.data("objects").x_test, domains.load("objects").x_test)


def test_a_folder_that_lacks_something_is_refused(tmp_path):
    with pytest.raises(CovNormError, match="nowhere: has none of the folders FGVC, MITIndoor"):
        originals.names(tmp_path / "nowhere")
    write(tmp_path / "Flowers" / "train", {"daisy": 3, "rose": 3})
    write(tmp_path / "Flowers" / "val", {"daisy": 1, "rose": 1})
    with pytest.raises(CovNormError, match=r"Flowers: has no test images. Add them"):
        originals.load("Flowers", tmp_path)
    with pytest.raises(CovNormError, match=r"no dataset 'flower': did you mean 'Flowers'\?"):
        originals.load("flower", tmp_path)


def test_the_docs_name_every_piece():
    page = (Path(__file__).parents[2] / "docs" / "benchmark.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.M)) == profiles.PIECES
    assert all(f"`{name}`" in page for name in originals.NAMES)


# ── the Decathlon's archive ──────────────────────────────────────────────────────────────────────

CLASSES = {30: "c", 10: "a", 20: "b"}  # ids in no order: labels go by theirs


def write_part(root, name, part, n, size=(90, 72)):
    """n images, of the classes in turn, of one colour each."""
    images, annotations = [], []
    for i in range(n):
        category = list(CLASSES)[i % len(CLASSES)]
        file = f"data/{name}/{part}/{i:03d}.png"
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (4 * category, i, 200 if part == "train" else 100)).save(root / file)
        images.append({"id": i + 1, "file_name": file})
        annotations.append({"id": i, "image_id": i + 1, "category_id": category})
    found = {"images": images, "annotations": annotations}
    found["categories"] = [{"id": c, "name": label} for c, label in CLASSES.items()]
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"{name}_{part}.json").write_text(json.dumps(found))


@pytest.fixture
def folder(tmp_path):
    """A folder with an archive of two datasets and of what they start from."""
    root = tmp_path / "originals" / "decathlon-1.0"
    for name in ("svhn", "dtd", "imagenet12"):
        write_part(root, name, "train", 42)
        write_part(root, name, "val", 9)
    return tmp_path / "originals"


def test_a_dataset_of_the_decathlon_in_three_parts(folder, capsys):
    archive = originals.archive_in(folder)
    assert originals.archive_in(folder / "decathlon-1.0").root == archive.root
    found = originals.dataset("dtd", archive)
    assert found.classes == ("a", "b", "c")
    # Two of a class's fourteen are for validation, and the labels of test are those of val.
    assert Counter(found.y_val.tolist()) == {0: 2, 1: 2, 2: 2}
    assert Counter(found.y_train.tolist()) == {0: 12, 1: 12, 2: 12}
    assert Counter(found.y_test.tolist()) == {0: 3, 1: 3, 2: 3}
    assert found.x_train.shape[1:] == (3, 64, 64)
    assert originals.dataset("svhn", archive).x_train.shape[1:] == (3, 72, 72)  # whole
    for part in domains.PARTS:
        x, y = getattr(found, f"x_{part}"), getattr(found, f"y_{part}")
        assert x[:, 0, 5, 5].tolist() == [40 * (label + 1) for label in y.tolist()]
    both = torch.cat([found.x_train, found.x_val])[:, 1, 5, 5]
    assert sorted(both.tolist()) == list(range(42))  # no image in both, none lost
    seventh = [*range(18, 21), *range(39, 42)]  # the 7th and the 14th of each of three classes
    assert found.x_val[:, 1, 5, 5].tolist() == seventh
    assert (found.x_train[:, 2] == 200).all()
    assert (found.x_test[:, 2] == 100).all()
    assert capsys.readouterr().out.count("decoding dtd") == 1
    # What is decoded is kept; other annotations are other data.
    originals.dataset("dtd", archive)
    assert capsys.readouterr().out == ""
    write_part(archive.root, "dtd", "val", 6)
    assert len(originals.dataset("dtd", archive).y_test) == 6


def test_of_the_source_no_more_is_held_than_is_tested_on(folder):
    found = originals.dataset("imagenet12", originals.archive_in(folder))
    assert [len(y) for y in (found.y_train, found.y_val, found.y_test)] == [8, 6, 9]


@pytest.mark.slow
def test_table_2_runs_on_the_archive(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ledger, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(originals, "PIXELS", 16)
    monkeypatch.setattr(pretraining, "EPOCHS", 1)
    monkeypatch.setattr(table2, "METHODS", ("fnft", "lwf", "ra", "covnorm"))
    for length in ("WHOLE", "EPOCHS", "TUNING"):
        monkeypatch.setattr(f"benchmarks.paper.bench.{length}", 1)
    monkeypatch.setattr("benchmarks.paper.keys.WHOLE", 1)
    lines = Lines("originals")
    profiles.piece("table2", lines, folder)
    small = Bench("resnet26", lines, folder)
    assert (small.origin, small.domains) == ("imagenet12", ("dtd", "svhn", "imagenet12"))
    assert small.net.backbone.fc.out_features == 3
    assert [r["method"] for r in lines.rows if r["domain"] == "imagenet12"] == ["source"]
    counted = Counter(r["method"] for r in lines.rows)
    assert counted == {"source": 1, "fnft": 2, "lwf": 2, "ra": 2, "covnorm": 2}
    assert all(r["n"] == 9 for r in lines.rows if r["method"] != "source")
    kept = [r["forgetting"] for r in lines.rows if r["method"] == "lwf"]
    assert all({"before", "after"} <= found.keys() for found in kept)
    for r in lines.rows:  # what starts from an A says which
        of_covnorm = r["method"] == "covnorm"
        A = small.start(small.trained(r["domain"], 0))["A"] if of_covnorm else None
        assert r.get("A") == A
    joint = small.together("covnorm-joint", ["dtd", "svhn"], 0, variance=0.9)
    alone = [small.start(small.trained(d, 0))["A"] for d in ("dtd", "svhn")]
    assert [r["A"] for r in joint] == alone
    assert {r["weights"] for r in lines.rows} == {pretraining.weights(small.archive)}
    capsys.readouterr()
    text = "".join(paper._ending(lines.rows, folder))
    assert "| method | dtd | svhn | mean | score |" in text
    assert f"on imagenet12 (test accuracy {lines.rows[0]['accuracy']:.1f} %)" in text
    assert "its val parts" in text
    assert "All cells were run." in text
    # Rows of another network are none of this table's.
    others = [{**r, "weights": "another"} for r in lines.rows]
    assert "0 of 8 cells were run." in "".join(paper._ending(others, folder))


def test_without_images_of_imagenet_the_archive_starts_from_our_objects(folder, monkeypatch):
    assert originals.archive_in(folder).names == ("dtd", "svhn", "imagenet12")
    shutil.rmtree(folder / "decathlon-1.0" / "data" / "imagenet12")  # the devkit has no images
    place_small(monkeypatch, "objects")
    small = Bench("resnet26", Lines("nothing"), folder)
    assert (small.origin, small.domains) == ("objects", ("dtd", "svhn"))
    assert torch.equal(small.data("objects").x_test, domains.load("objects").x_test)
    theirs = Bench("resnet26", Lines("nothing")).where("objects", 0)
    assert small.where("objects", 0) == theirs  # the same network, the same images
    source = {**theirs, "method": "source", "accuracy": 61.5}
    text = "".join(paper._ending([source], folder))
    assert "on objects (test accuracy 61.5 %)" in text


def test_with_the_archive_alone_full_is_table_2(folder, tmp_path, monkeypatch, capsys):
    assert profiles.full() == profiles.PIECES
    assert profiles.full(folder) == ("table2",)
    write(folder / "Flowers", {"daisy": 20, "rose": 20})
    assert profiles.full(folder) == profiles.PIECES
    shutil.rmtree(folder / "Flowers")
    monkeypatch.setattr("sys.argv", ["paper", "quick", "--data", str(folder)])
    monkeypatch.setattr(ledger, "RESULTS", tmp_path / "results")
    with pytest.raises(SystemExit) as ended:
        paper.main()
    assert ended.value.code == 2
    assert "archive is only for table2" in capsys.readouterr().err
