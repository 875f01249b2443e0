"""Sources of images: folders, .csv and .npz files, and their splits."""

from __future__ import annotations

import os
import random
import time
import unicodedata
from collections import Counter

import numpy as np
import pytest
from command import photos

from torch_covnorm import CovNormError
from torch_covnorm.data import Items, Source, read_source
from torch_covnorm.data.decode import duplicates
from torch_covnorm.data.splits import complete, cut


def touch(root, *names):
    """Create empty files: a source is read before its images are."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def many(start, n, ending="jpg"):
    return [f"{start}/{i}.{ending}" for i in range(n)]


def shown(source: Source, split: str) -> dict[str, str]:
    items = source.splits[split]
    return {n: source.classes[k] for n, k in zip(items.names, items.labels, strict=True)}


def sizes(source: Source) -> dict[str, int]:
    return {split: len(items) for split, items in source.splits.items()}


def table(root, text, name="list.csv"):
    file = root / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


# ── folders ─────────────────────────────────────────────────────────────────────────────────────


def test_given_splits_are_used_as_they_are(tmp_path):
    for val in ("val", "valid", "Validation"):
        root = tmp_path / val
        for split, n in (("train", 9), (val, 3), ("test", 2)):
            touch(root, *many(f"{split}/cat", n), *many(f"{split}/dog", n))
        source = read_source(root)
        assert (source.format, source.path, source.folder) == ("folder", root, root)
        assert source.classes == ("cat", "dog")
        assert sizes(source) == {"train": 18, "val": 6, "test": 4}
        assert shown(source, "val")[f"{val}/dog/2.jpg"] == "dog"
        assert source.notes == ()


def test_one_level_of_classes_is_split_by_the_rules(tmp_path):
    source = read_source(touch(tmp_path, *many("cat", 20), *many("dog", 40), *many("eel", 1)))
    counts = {s: Counter(shown(source, s).values()) for s in source.splits}
    assert list(counts) == ["train", "val", "test"]
    assert counts["test"] == {"cat": 5, "dog": 10}  # 25 %
    assert counts["val"] == {"cat": 2, "dog": 5}  # 15 % of 15 and of 30, halves up
    assert counts["train"] == {"cat": 13, "dog": 25, "eel": 1}


def test_train_and_test_get_a_validation_part_and_train_and_val_get_no_test(tmp_path):
    touch(tmp_path / "a", *many("train/x", 20), *many("train/y", 20), *many("test/x", 3))
    assert sizes(read_source(tmp_path / "a")) == {"train": 34, "val": 6, "test": 3}
    touch(tmp_path / "b", *many("train/x", 20), *many("train/y", 20), *many("val/x", 3))
    assert sizes(read_source(tmp_path / "b")) == {"train": 40, "val": 3}
    touch(tmp_path / "c", *many("train/x", 20), *many("train/y", 20))
    assert sizes(read_source(tmp_path / "c")) == {"train": 26, "val": 4, "test": 10}


def test_names_with_spaces_accents_and_any_case_work(tmp_path):
    touch(tmp_path, "ein Hund/a b.JPG", "日本/ü.Png", "日本/.hidden.png", "ein Hund/c;d,e.tiff")
    source = read_source(tmp_path)
    assert source.classes == ("ein Hund", "日本")
    names = {n for items in source.splits.values() for n in items.names}
    assert names == {"ein Hund/a b.JPG", "日本/ü.Png", "ein Hund/c;d,e.tiff"}
    assert all((source.folder / n).exists() for n in names)


def test_an_accent_is_the_same_however_a_disk_writes_it(tmp_path):
    composed, apart = (unicodedata.normalize(norm, "café") for norm in ("NFC", "NFD"))
    assert composed != apart
    touch(tmp_path, *many(f"train/{composed}", 4), *many("train/tea", 4), f"test/{apart}/1.jpg")
    source = read_source(tmp_path)
    assert source.classes == (composed, "tea")
    assert shown(source, "test") == {f"test/{apart}/1.jpg": composed}


def test_files_that_are_not_images_are_ignored_and_counted(tmp_path):
    touch(tmp_path, *many("cat", 3), *many("dog", 3), "README.txt", ".DS_Store", ".git/x.jpg")
    touch(
        tmp_path, "cat/Thumbs.db", "cat/notes.txt", "dog/.x.jpg", "dog/.trash/y.jpg", "dog/LICENSE"
    )
    source = read_source(tmp_path)
    assert sum(map(len, source.splits.values())) == 6
    assert source.notes == (
        "ignored: *.db files (1), *.txt files (1), files beside the class folders (1), files "
        "without an ending (1), hidden files (4)",
    )


def test_nested_folders_belong_to_their_class(tmp_path):
    touch(tmp_path, "cat/2019/may/1.jpg", "cat/2.jpg", "dog/x.jpg/1.png")
    source = read_source(tmp_path)
    names = {n: c for s in source.splits for n, c in shown(source, s).items()}
    assert names == {"cat/2019/may/1.jpg": "cat", "cat/2.jpg": "cat", "dog/x.jpg/1.png": "dog"}


def test_folders_called_train_are_a_split_only_where_they_hold_folders(tmp_path):
    touch(tmp_path / "vehicles", *many("train", 4), *many("plane", 4), *many("test", 4))
    assert read_source(tmp_path / "vehicles").classes == ("plane", "test", "train")
    touch(tmp_path / "set", *many("train/a", 4), *many("train/b", 4), "annotations/x.json")
    source = read_source(tmp_path / "set")
    assert source.classes == ("a", "b")
    assert source.notes == ("ignored: folders beside train/ (1)",)
    touch(tmp_path / "flat", *many("train", 4), *many("test", 4))  # labels are elsewhere
    with pytest.raises(CovNormError, match=r"flat: no images .*beside the class folders"):
        read_source(tmp_path / "flat")


def test_an_empty_class_is_left_out_with_a_note(tmp_path):
    touch(tmp_path, *many("train/a", 4), *many("train/b", 4), "train/c/notes.txt", "test/c/x.txt")
    touch(tmp_path, "test/a/1.jpg")
    source = read_source(tmp_path)
    assert source.classes == ("a", "b")
    assert any("without training images: class 'c'" in note for note in source.notes)


BAD_FOLDERS = {
    "a class that train lacks": (
        [*many("train/a", 4), *many("train/b", 4), "test/c/1.jpg"],
        r"test has images of 'c', which train lacks",
    ),
    "one class": (many("cat", 9), r"only one class, 'cat'\. Add images of another"),
    "one class with images": ([*many("cat", 9), "dog/x.txt"], r"only one class, 'cat'"),
    "no images": (
        ["a/readme.txt", "b/readme.txt"],
        r"no images .*one subfolder of images per class",
    ),
    "nothing": (["x.txt"], r"no images .*one subfolder of images per class"),
    "no train": ([*many("test/a", 2), *many("val/a", 2)], r"'test', 'val' but no train/"),
    "two of one": (
        [*many("train/a", 2), *many("train/b", 2), "val/a/1.jpg", "valid/a/1.jpg"],
        r"'val', 'valid', which mean the same",
    ),
}


@pytest.mark.parametrize(("names", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_an_unusable_folder_is_an_error_with_the_reason(names, message, tmp_path):
    touch(tmp_path / "mine", *names)
    with pytest.raises(CovNormError, match=rf"mine: .*{message}"):
        read_source(tmp_path / "mine")


def test_links_are_followed_and_loops_end(tmp_path):
    touch(tmp_path / "data", *many("cat", 3), *many("dog", 3))
    touch(tmp_path, "elsewhere/9.jpg")
    (tmp_path / "data" / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "cat" / "self").symlink_to(".")
    (tmp_path / "data" / "cat" / "up").symlink_to("..")
    (tmp_path / "data" / "dog" / "again").symlink_to(tmp_path / "data" / "dog")
    (tmp_path / "data" / "loop").symlink_to("loop")
    for i in range(12):  # every folder leads to every other: 12! ways through them
        for k in range(12):
            (tmp_path / "data" / "eel" / str(i)).mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / "eel" / str(i) / f"to {k}").symlink_to(f"../{k}")
        touch(tmp_path, f"data/eel/{i}/1.jpg")
    source = read_source(tmp_path / "data")
    counts = Counter(c for s in source.splits for c in shown(source, s).values())
    assert counts == {"cat": 4, "dog": 3, "eel": 12}
    assert "links to folders that are read already" in source.notes[0]


def test_a_path_that_is_not_a_source_lists_what_is_accepted(tmp_path):
    with pytest.raises(CovNormError, match=r"none: does not exist\. Use a folder"):
        read_source(tmp_path / "none")
    touch(tmp_path, "a.zip", "b.jpg")
    with pytest.raises(CovNormError, match=r"a\.zip: is an archive\. Unpack it"):
        read_source(tmp_path / "a.zip")
    with pytest.raises(CovNormError, match=r"b\.jpg: is not a source of images\. Use a folder"):
        read_source(str(tmp_path / "b.jpg"))
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(CovNormError, match=r"pipe\.csv: is not a source"):
        read_source(tmp_path / "pipe.csv")


# ── splitting ───────────────────────────────────────────────────────────────────────────────────


def test_every_image_is_in_one_split_and_every_class_keeps_one_to_train():
    for trial in range(200):
        rng = random.Random(trial)
        sizes = [rng.choice([1, 1, 2, 3, 4, 7, 20, rng.randrange(1, 90)]) for _ in range(9)]
        labels = [k for k, n in enumerate(sizes) for _ in range(n)]
        names = [f"{k}/{i}.png" for i, k in enumerate(labels)]
        splits = complete({"train": Items(tuple(names), tuple(labels))}, seed=trial)
        assert sorted(n for items in splits.values() for n in items.names) == sorted(names)
        counts = {s: Counter(items.labels) for s, items in splits.items()}
        for k, n in enumerate(sizes):
            test = min(int(n / 4 + 0.5), n - 1)
            val = min(round((n - test) * 0.15 + 1e-9), n - test - 1)  # halves up
            got = [counts.get(s, Counter())[k] for s in ("test", "val", "train")]
            assert got == [test, val, n - test - val]
            assert got[2] >= 1
        assert all(len(items) for items in splits.values())  # else absent
        assert set(cut(splits["train"], 100, 0)[0].labels) == set(range(9))  # one of each stays


def test_the_seed_decides_and_the_order_of_files_does_not():
    names = [f"{i % 7}/{i}.jpg" for i in range(400)]
    random.Random(1).shuffle(names)

    def split(names, seed):
        items = Items(tuple(names), tuple(int(n[0]) for n in names))
        return {s: frozenset(i.names) for s, i in complete({"train": items}, seed).items()}

    assert split(names, 5) == split(names[::-1], 5) == split(sorted(names), 5)
    assert split(names, 5) != split(names, 6)
    more = split([*names, "3/new.jpg"], 5)  # one more image moves few others
    assert sum(len(split(names, 5)[s] - more[s]) for s in more) <= 3
    order = Items(tuple(names), tuple(int(n[0]) for n in names))
    stay, gone = cut(order, 25, 0)
    for part in (stay, gone):  # both keep it
        assert sorted(part.names, key=names.index) == list(part.names)


def test_ten_thousand_classes_are_split_quickly(tmp_path):
    y = np.arange(50_000) % 10_000
    np.savez(tmp_path / "a.npz", x=np.zeros((50_000, 8, 8), np.uint8), y=y)
    start = time.perf_counter()
    source = read_source(tmp_path / "a.npz")
    assert time.perf_counter() - start < 5
    assert len(source.classes) == 10_000
    assert source.classes[:3] == ("0", "1", "2")
    assert sizes(source) == {"train": 30_000, "val": 10_000, "test": 10_000}


def test_duplicates_pair_a_file_with_the_first_of_each_split_before():
    splits = {
        "train": [(1, "a"), (1, "b"), (2, "c")],
        "val": [(1, "d")],
        "test": [(1, "e"), (3, "f")],
    }
    assert duplicates(splits) == (("a", "d"), ("a", "e"), ("d", "e"))


# ── .csv ────────────────────────────────────────────────────────────────────────────────────────

ROWS = [(f"im/{i} ü.jpg", "a;b" if i % 2 else "c,d") for i in range(8)]
TABLES = {"commas": ",".join, "semicolons": ";".join, "tabs": "\t".join}


@pytest.mark.parametrize("join", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("header", [None, ("File", "LABEL"), ("id", "target", "image")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_csv_is_read_with_any_separator_header_and_encoding(
    join, header, encoding, newline, tmp_path
):
    quoted = [tuple(f'"{cell}"' for cell in row) for row in ROWS]
    if header and len(header) == 3:
        quoted = [("7", label, path) for path, label in quoted]
    lines = [join(row) for row in ([header] if header else []) + quoted] + [""]
    source = read_source(table(tmp_path, newline.join(lines).encode(encoding)))
    assert (source.format, source.folder) == ("csv", tmp_path)
    assert source.classes == ("a;b", "c,d")
    assert {n: c for s in source.splits for n, c in shown(source, s).items()} == dict(ROWS)
    assert len(source.splits["test"]) == 2


def test_a_csv_names_splits_and_repeats_nothing(tmp_path):
    text = "path,label,split\na.jpg,1,train\nb.jpg,02,Train\nc.jpg,1,valid\nd.jpg,02,test\n"
    source = read_source(table(tmp_path, text + "\n \nd.jpg,02,test\n"))
    assert source.classes == ("02", "1")
    assert {s: shown(source, s) for s in source.splits} == {
        "train": {"a.jpg": "1", "b.jpg": "02"},
        "val": {"c.jpg": "1"},
        "test": {"d.jpg": "02"},
    }
    assert source.notes == ("ignored: lines that repeat another (1)",)
    same = read_source(table(tmp_path, text.partition("\n")[2]))  # without the header
    assert {s: shown(same, s) for s in same.splits} == {s: shown(source, s) for s in source.splits}


BAD_TABLES = {
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
    "only a header": ("path,label\n", "no images to train with"),
    "no label": ("path,label\na.jpg,x\nb.jpg,\n", "line 3 has no label"),
    "no path": ("a.jpg,x\n,y\n", "line 2 has no path"),
    "one column": ("a.jpg\nb.jpg\n", "line 1 has no label; line 2 has no label"),
    "four columns": ("a.jpg,x,train,9\nb.jpg,y,train,9\n", "line 1 has 4 columns instead of 3"),
    "split": ("a.jpg,x,train\nb.jpg,y,tset\n", r"line 2 has split 'tset', did you mean 'test'"),
    "no split": ("a.jpg,x,train\nb.jpg,y\n", "line 2 has no split"),
    "two labels": ("a.jpg,x\nb.jpg,y\na.jpg,y\n", "line 3 has label 'y' for the image of line 1"),
    "a line break in quotes": ('"a\n1.jpg",x\nb.jpg,\n', "line 3 has no label"),
    "many": ("a.jpg,\n" * 9, r"line 3 has no label and 6 more\. Correct"),
    "header of other names": (
        "img_path,kind\na.jpg,x\nb.jpg,y\n",
        "line 1 has no known column names.*filename",
    ),
    "open quote": ('a.jpg,x\n"b.jpg,y\nc.jpg,z\n', "line 2 is not valid .csv"),
    "latin-1": ("a.jpg,x\nb.jpg,é\n".encode("latin-1"), "line 2 is not UTF-8 text"),
    "only test": ("a.jpg,x,test\nb.jpg,y,test\n", "no images to train with"),
    "a class that train lacks": ("a.jpg,x,train\nb.jpg,y,train\nc.jpg,z,val\n", "val has .*'z'"),
    "huge cell": ("a.jpg," + "x" * 200_000 + "\nb.jpg,y\n", "line 1 is not valid .csv .*limit"),
}


@pytest.mark.parametrize(("text", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_rows_are_named_by_line(text, message, tmp_path):
    with pytest.raises(CovNormError, match=rf"list\.csv: .*{message}"):
        read_source(table(tmp_path, text))


MULTI_LABEL = {
    "pipes": (
        "path,label\na.jpg,cat\nb.jpg,dog\nc.jpg,cat|dog\n",
        r"line 4, column 'label': 'cat\|dog' names several labels",
    ),
    "semicolons": (
        "file,target\na.jpg,cat; dog\nb.jpg,dog;bird\n",
        "line 2, column 'target': 'cat; dog' names several",
    ),
    "two labels in every row, no header": (
        "a.jpg,cat;dog\nb.jpg,dog;bird\nc.jpg,cat;bird\n",
        "line 1, column '2': 'cat;dog' names several labels",
    ),
    "an ending separator": ("a.jpg,cat|dog|\nb.jpg,cat|\n", "line 1, .*names several labels"),
    "quoted among semicolons": (
        'path;label\na.jpg;"cat;dog"\nb.jpg;dog\n',
        "line 2, .*'cat;dog' names several",
    ),
    "columns of 0 and 1": (
        "image,cat,dog,bird\na.jpg,0,1,1\nb.jpg,1,0,0\n",
        "line 1: columns 'cat', 'dog', 'bird' have only 0 and 1",
    ),
    "columns with unknown names": (
        "image_id,healthy,rust,scab,mold\na.jpg,0,1.0,true,0\nb.jpg,1,0.0,False,0\n",
        "columns 'healthy', 'rust', 'scab' and 1 more have only 0 and 1",
    ),
    "columns and splits": (
        "image,cat,dog,split\na.jpg,0,1,train\nb.jpg,1,0,val\n",
        "columns 'cat', 'dog' have only 0 and 1",
    ),
    "columns without a header": ("a.jpg,0,1,1\nb.jpg,1,0,0\n", "line 1: columns 2, 3, 4 have only"),
    "one line per label": (
        "path,label\na.jpg,cat\nb.jpg,dog\na.jpg,dog\n",
        "line 4 has label 'dog' for the image of line 2, 'cat'",
    ),
    "one line per label, in two splits": (
        "path,label,split\na.jpg,cat,train\nb.jpg,dog,train\na.jpg,dog,val\n",
        "line 4 has label 'dog' for the image of line 2, 'cat'",
    ),
}


@pytest.mark.parametrize(("text", "message"), MULTI_LABEL.values(), ids=MULTI_LABEL)
def test_a_multi_label_table_is_refused_by_name(text, message, tmp_path):
    remedy = r"Give every image one label: multi-label tasks are not supported yet\."
    with pytest.raises(CovNormError, match=rf"list\.csv: .*{message}.*{remedy}"):
        read_source(table(tmp_path, text))


ONE_LABEL = {
    "commas in quotes": ('path,label\na.jpg,"cat, small"\nb.jpg,"cat"\nc.jpg,small\n', None),
    "numbers": ("path,label\na.jpg,0\nb.jpg,1\n", None),
    "numbers without a header": ("a.jpg,0\nb.jpg,1\n", None),
    "a label and other columns of 0 and 1": (
        "path,label,flash,zoom\na.jpg,x,0,1\nb.jpg,y,1,1\n",
        None,
    ),
    "a smiley": ("path,label\na.jpg,;-)\nb.jpg,-)\nc.jpg,|x\n", None),
    "a name with a separator": (
        "path,label\na.jpg,salt|pepper\nb.jpg,sugar\n",
        r"labels with | or ; are read as one class each, for example 'salt|pepper' (line 2)",
    ),
}


@pytest.mark.parametrize(("text", "note"), ONE_LABEL.values(), ids=ONE_LABEL)
def test_a_table_with_one_label_per_image_is_not_refused(text, note, tmp_path):
    source = read_source(table(tmp_path, text))
    assert len(source.classes) == text.count(".jpg")
    assert source.notes == (() if note is None else (note,))


# ── .npz ────────────────────────────────────────────────────────────────────────────────────────

NOISE = np.random.default_rng(0).integers(0, 256, (12, 9, 10, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def npz(root, **arrays):
    np.savez(root / "data.npz", **arrays)
    return read_source(root / "data.npz")


@pytest.mark.parametrize("layout", ["hw", "hw1", "hw3", "3hw", "1hw", "float"])
def test_rows_of_every_shape_are_the_same_pixels(layout, tmp_path):
    x = NOISE[..., :1] if "1" in layout or layout == "hw" else NOISE
    given = {
        "hw": x[..., 0],
        "3hw": x.transpose(0, 3, 1, 2),
        "1hw": x.transpose(0, 3, 1, 2),
        "float": np.clip((x - 0.4) / 255, 0, 1).astype(np.float32),  # to the nearest
    }.get(layout, x)
    source = npz(tmp_path, x_train=given, y_train=LABELS, x_test=given[:2], y_test=LABELS[:2])
    assert source.format == "npz"
    for items in source.splits.values():
        rows = [int(name[name.index("[") + 1 : -1]) for name in items.names]
        assert np.array_equal(items.pixels, x[rows])
        assert list(items.labels) == LABELS[rows].tolist()
    assert source.splits["test"].names == ("x_test[0]", "x_test[1]")


@pytest.mark.parametrize(
    ("y", "more", "classes"),
    [
        (LABELS * 5, {}, ("0", "5", "10")),  # by number, not "0", "10", "5"
        (LABELS.astype(np.uint8)[:, None], {}, ("0", "1", "2")),
        (LABELS > 0, {}, ("0", "1")),
        (np.array(["b", "a", "ü"])[LABELS], {}, ("a", "b", "ü")),
        (np.array([b"b", b"a", b"c"])[LABELS], {}, ("a", "b", "c")),
        (LABELS, {"classes": np.array(["z", "y", "x"])}, ("z", "y", "x")),
        (np.array(["y", "x"])[LABELS % 2], {"classes": np.array(["z", "y", "x"])}, ("y", "x")),
    ],
)
def test_labels_are_numbers_or_strings_and_classes_keep_their_order(y, more, classes, tmp_path):
    source = npz(tmp_path, x=NOISE, y=y, **more)
    assert source.classes == classes
    names = [more["classes"][k] if more and y.dtype.kind in "iu" else k for k in y.reshape(-1)]
    expected = [n.decode() if isinstance(n, bytes) else str(n * 1) for n in names]
    for split in source.splits:
        for name, label in shown(source, split).items():
            assert label == expected[int(name[2:-1])]


BAD_ARRAYS = {
    "no y": ({"x": NOISE}, "has x but no y"),
    "no x": ({"x": NOISE, "y": LABELS, "y_test": LABELS}, "has y_test but no x_test"),
    "lengths": ({"x": NOISE, "y": LABELS[:5]}, "x has 12 rows but y has 5"),
    "other names": ({"images": NOISE, "labels": LABELS}, "no images .*'images', 'labels'.*x_train"),
    "no rows": ({"x": NOISE[:0], "y": LABELS[:0]}, "no images to train with"),
    "int pixels": ({"x": NOISE.astype(int), "y": LABELS}, "x is int64: must be uint8"),
    "floats to 255": (
        {"x": NOISE.astype(float), "y": LABELS},
        r"from 0 to 255: .*\[0, 1\]\. Scale",
    ),
    "negative": ({"x": NOISE / 127.5 - 1, "y": LABELS}, "from -1 to 1"),
    "NaN": ({"x": np.full((12, 8, 8), np.nan), "y": LABELS}, "from nan"),
    "shape": ({"x": NOISE[..., 0, 0], "y": LABELS}, r"x has shape \(12, 9\)"),
    "RGBA": ({"x": NOISE[..., [0, 1, 2, 2]], "y": LABELS}, r"x has shape \(12, 9, 10, 4\)"),
    "small": ({"x": NOISE[:, :7], "y": LABELS}, "8 pixels or more"),
    "one class": ({"x": NOISE, "y": LABELS * 0}, "only one class, '0'"),
    "float labels": ({"x": NOISE, "y": LABELS / 2}, "y is float64"),
    "one-hot labels": ({"x": NOISE, "y": np.eye(3, dtype=int)[LABELS]}, r"y is int64 \(12, 3\)"),
    "label outside": (
        {"x": NOISE, "y": LABELS, "classes": ["a", "b"]},
        "label 2 is not one of the 2 classes",
    ),
    "label below": (
        {"x": NOISE, "y": LABELS - 1, "classes": ["a", "b"]},
        "label -1 is not one of the 2 classes",
    ),
    "classes twice": ({"x": NOISE, "y": LABELS, "classes": list("aba")}, "a name twice"),
    "class that train lacks": (
        {"x": NOISE, "y": LABELS % 2, "x_test": NOISE, "y_test": LABELS},
        "test has images of '2'",
    ),
}


@pytest.mark.parametrize(("arrays", "message"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_arrays_that_do_not_fit_are_refused_with_the_remedy(arrays, message, tmp_path):
    with pytest.raises(CovNormError, match=rf"data\.npz: .*{message}"):
        npz(tmp_path, **arrays)


def test_a_class_whose_name_is_not_text_is_refused(tmp_path):
    photos(tmp_path / "photos")
    odd = os.fsdecode(os.fsencode(tmp_path / "photos") + b"/caf\xe9")
    next((tmp_path / "photos").iterdir()).rename(odd)
    with pytest.raises(CovNormError, match=r"is not valid text\. Rename it"):
        read_source(tmp_path / "photos")
