"""The strangers' image folders: split by source, without duplicates. Nothing needs a network."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from small_archives import picture, tgz, zipped

from benchmarks import fetch
from benchmarks.domains import DOMAINS
from benchmarks.strangers import folders, readers
from benchmarks.strangers.readers import STRANGERS, Picture
from torch_covnorm.data import read_source


def plain(*color: int) -> Image.Image:
    return Image.new("RGB", (80, 90), color)


def pictures(per_source: int, sources: int) -> list[Picture]:
    return [
        Picture(label, f"{label}{s}", plain(k, s, i))
        for k, label in enumerate("ab")
        for s in range(sources)
        for i in range(per_source)
    ]


def colors(part: folders.Part, label: str, channel: int) -> set[int]:
    return {image.getpixel((0, 0))[channel] for image in part[label]}


def test_a_source_is_in_train_or_in_test():
    train, test = folders.split(pictures(5, 8), test=9, keep=10)
    for label in "ab":
        assert len(test[label]) == 9
        assert not colors(train, label, 1) & colors(test, label, 1)
        assert len(colors(test, label, 1)) == 2  # at most half, rounded up, of one source
        assert len(train[label]) == 5 * 6


def test_train_keeps_what_it_needs():
    train, test = folders.split(pictures(1, 30), test=20, keep=25)
    assert {len(images) for images in train.values()} == {25}
    assert {len(images) for images in test.values()} == {5}
    train, test = folders.split(pictures(30, 3), test=60, keep=50)
    assert (len(train["a"]), len(test["a"])) == (60, 30)  # another source would leave too few


def test_equal_images_are_kept_once_and_contradictory_ones_not_at_all():
    given = pictures(1, 4)
    twice = [p._replace(source="other") for p in given[:2]]
    other_label = given[2]._replace(label="b")
    train, test = folders.split([*given, *twice, other_label], test=0, keep=0)
    assert not any(test.values())
    assert colors(train, "a", 1) == {0, 1, 3}
    assert [len(train[k]) for k in "ab"] == [3, 4]


def test_the_order_of_the_files_does_not_matter():
    one, other = (folders.split(p, 4, 10) for p in (pictures(2, 9), pictures(2, 9)[::-1]))
    for a, b in zip(one, other, strict=True):
        assert {k: [i.tobytes() for i in v] for k, v in a.items()} == {
            k: [i.tobytes() for i in v] for k, v in b.items()
        }


def test_the_shorter_side_becomes_64():
    assert folders.shrunk(plain(1, 2, 3)).size == (64, 72)
    assert folders.shrunk(Image.new("RGB", (300, 20))).size == (960, 64)


@pytest.fixture
def small_textiles(tmp_path, monkeypatch):
    """The layout of the package, with 30 images in each of three classes."""
    monkeypatch.setenv("COVNORM_CACHE", str(tmp_path))
    stranger = STRANGERS["textiles"]
    (package,) = stranger.packages
    rng = np.random.default_rng(0)
    files = {
        f"{package.folder}{label}/textile_{i:04}.jpg": picture(
            rng.integers(0, 255, (70, 70, 3), dtype=np.uint8)
        )
        for label in ("global", "local", "nominal")
        for i in range(30)
    }
    blob = zipped(files)
    changed = replace(package, sha256=hashlib.sha256(blob).hexdigest())
    file = fetch._place(changed)
    file.parent.mkdir(parents=True)
    file.write_bytes(blob)
    small = stranger._replace(packages=(changed,), test=8, train=20)
    monkeypatch.setitem(STRANGERS, "textiles", small)
    return file


def test_a_folder_is_what_covnorm_add_reads(small_textiles):
    folder = folders.folder("textiles", 20)
    source = read_source(folder)
    assert source.classes == ("global", "local", "nominal")
    sizes = {split: len(items) for split, items in source.splits.items()}
    assert sizes == {"train": 51, "val": 9, "test": 24}  # 15 % of 20 are 3
    assert folders.folder("textiles", 50) is None  # too few images
    small_textiles.unlink()
    assert folders.folder("textiles", 20) == folder  # made once


def test_a_changed_rule_makes_the_folder_again(small_textiles, monkeypatch):
    folders.folder("textiles", 20)
    monkeypatch.setitem(STRANGERS, "textiles", STRANGERS["textiles"]._replace(test=4))
    folder = folders.folder("textiles", 20)
    assert len(list((folder / "test" / "local").iterdir())) == 4


# ── readers ──────────────────────────────────────────────────────────────────────────────────


def image(width: int = 128, color: tuple[int, ...] = (9, 9, 9, 255)) -> bytes:
    out = io.BytesIO()
    Image.new("RGBA", (width, width), color).save(out, "PNG")
    return out.getvalue()


def test_transparent_parts_become_white():
    (icon,) = readers.icons({"apps/a-b-c.png": image(color=(0, 0, 0, 0)), "x/y.png": b""})
    assert icon.image.getpixel((5, 5)) == (255, 255, 255)
    assert (icon.label, icon.source) == ("apps", "a-b")


def test_the_frames_of_a_figure_are_one_source():
    figures = [f"f{chr(97 + i)}" for i in range(15)]
    files = {f"elves/{f}-attack-{i}.png": image() for f in figures for i in (1, 2)}
    files |= {"elves/fa+female.png": image(), "elves/fa/run-1.png": image()}
    files |= {f"ogres/{f}.png": image() for f in figures[:14]}  # too few figures
    found = list(readers.units(files))
    assert {p.label for p in found} == {"elves"}
    assert {p.source for p in found} == set(figures)
    assert sum(p.source == "fa" for p in found) == 4


def test_the_quarters_of_a_texture_are_one_source():
    files = {f"textures/wall/brick{i}.jpg": image(256) for i in (1, 2)}
    packed = zipped({**files, "textures/wall/x.txt": b"", "textures/wall/small.jpg": image(64)})
    found = list(readers.textures({"pak4-textures.pk3": packed}))
    assert [p.image.size for p in found] == [(128, 128)] * 8
    assert {(p.label, p.source) for p in found} == {("wall", "brick")}


def test_emoji_are_named_by_their_group():
    about = [
        {"category": c, "image": f"{n}.png", "short_name": n}
        for c, n in (("Objects", "clock1"), ("Objects", "clock_2"), ("Flags", "flag-de"))
    ]
    files = {f"img/twitter/64/{e['image']}": image() for e in about}
    found = list(readers.emoji({"emoji.json": json.dumps(about).encode(), **files}))
    assert [(p.label, p.source) for p in found] == [("Objects", "clock")] * 2


def test_furniture_has_the_room_of_its_catalog():
    rooms = ["Kitchen", "Bathroom", "Bedroom", "Miscellaneous"]
    lines = [f"category#{i}={room}\r\nicon#{i}=/a/chair-{i}.png" for i, room in enumerate(rooms)]
    blobs = {f"a/chair-{i}.png": image() for i in range(len(rooms))}
    catalog = {"PluginFurnitureCatalog.properties": "\n".join(lines).encode()}
    found = list(readers.furniture({"some.sh3f": zipped({**blobs, **catalog})}))
    assert [(p.label, p.source) for p in found] == [("Kitchen", "chair"), ("Bedroom", "chair")]


def test_patches_are_where_cells_are():
    mask = np.zeros((128, 192), np.uint8)
    mask[:, :64] = 3
    micrograph = np.zeros((128, 192, 3), np.uint8)
    micrograph[..., 1] = 200
    files = {"kc/1_img.png": picture(micrograph), "kc/1_masks.png": picture(mask)}
    found = list(readers.cells(files))
    assert len(found) == 2 * 3  # at x = 0 (all of it) and 32 (half of it), three heights
    assert {p.image.getpixel((0, 0)) for p in found} == {(200, 200, 200)}


# ── packages ─────────────────────────────────────────────────────────────────────────────────


def test_the_packages_are_pinned_and_strange():
    packages = [p for s in STRANGERS.values() for p in s.packages]
    assert len(STRANGERS) >= 8
    known = {fetch.PACKAGES[name].spec for name in DOMAINS}
    for package in packages:
        assert package.spec not in known
        assert len(bytes.fromhex(package.sha256)) == 32
        assert package.licence
        assert package.folder.endswith("/")
    assert len({p.name for p in packages}) == len(packages)


def test_members_of_a_package_that_is_in_no_table(tmp_path, monkeypatch):
    monkeypatch.setenv("COVNORM_CACHE", str(tmp_path))
    blob = tgz({"package/a": b"1", "b": b"2"})
    sha256 = hashlib.sha256(blob).hexdigest()
    package = fetch.Package("new", "npm", "new@1", sha256, 1, "MIT", "", "package/")
    fetch._place(package).parent.mkdir()
    fetch._place(package).write_bytes(blob)
    assert fetch.members(package) == {"a": b"1"}
