"""Decoding a source to one size: pixels, unreadable images, and the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor, ImageOps

from torch_covnorm import CovNormError
from torch_covnorm.data import Items, decode, fit_image, load_image, prepare, read_source


def hwc(tensor):
    return tensor.permute(1, 2, 0).numpy()


# ── one size ────────────────────────────────────────────────────────────────────────────────────


def noise(n, h, w, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, 3, h, w), np.uint8))


@pytest.mark.parametrize(("h", "w"), [(100, 60), (37, 90), (20, 20), (64, 64), (8, 300)])
def test_squash_is_what_prepare_does_up_to_rounding(h, w):
    image = noise(1, h, w)
    fitted = fit_image(image[0], 64)
    assert fitted.dtype == torch.uint8
    assert fitted.is_contiguous()
    exact = 255 * prepare(image, 64, 0.0, 1.0)[0]
    assert (fitted - exact).abs().max() <= 1.01  # Pillow's arithmetic rounds twice


@pytest.mark.parametrize(("h", "w"), [(100, 60), (61, 90), (20, 20), (64, 64), (8, 300)])
def test_crop_is_the_middle_square(h, w):
    image = noise(1, h, w)[0]
    side = min(h, w)
    top, left = round((h - side) / 2), round((w - side) / 2)
    box = Image.fromarray(hwc(image)).crop((left, top, left + side, top + side))
    pillow = np.asarray(box.resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(hwc(fit_image(image, 64, "crop")) - pillow).max() <= 1
    if h != w:
        assert np.abs(hwc(fit_image(image, 64)) - pillow).max() > 20  # control


@pytest.mark.parametrize("background", ["white", "black", "#0a7fc3"])
@pytest.mark.parametrize(("h", "w"), [(100, 60), (61, 90), (33, 64), (20, 20), (8, 300), (10, 9)])
def test_letterbox_keeps_the_shape_and_pads_as_pillow_does(h, w, background):
    image = noise(1, h, w)[0]
    pad = ImageOps.pad(Image.fromarray(hwc(image)), (64, 64), Image.Resampling.BILINEAR, background)
    fitted = fit_image(image, 64, "letterbox", background)
    assert fitted.dtype == torch.uint8
    assert np.abs(hwc(fitted).astype(int) - np.asarray(pad)).max() <= 1
    color = torch.tensor(ImageColor.getrgb(background), dtype=torch.uint8)
    assert torch.equal(fitted[:, 0, 0], color) == (h != w)


def test_letterbox_of_a_strip_keeps_one_line_of_it():
    strip = torch.full((3, 1000, 2), 7, dtype=torch.uint8)
    fitted = fit_image(strip, 32, "letterbox", None)
    assert (fitted == 7).sum() == 3 * 32
    assert (fitted == 255).sum() == 3 * 31 * 32


def test_a_strip_of_a_million_pixels_is_cropped_in_little_memory():
    strip = torch.zeros(3, 8, 1_000_000, dtype=torch.uint8)
    strip[:, :, 499_996:500_004] = 200
    assert (fit_image(strip, 224, "crop") == 200).all()


def test_bad_settings_are_refused(source):
    with pytest.raises(CovNormError, match=r"'crob': did you mean 'crop'"):
        fit_image(noise(1, 9, 9)[0], 8, "crob")
    for bad in (
        {"fit": "crob"},
        {"background": "re"},
        {"size": 7},
        {"size": 8.5},
        {"workers": 0},
        {"limit": 1.1},
    ):
        with pytest.raises(CovNormError, match=next(iter(bad))):
            decode(source, **{"size": 32, **bad})


# ── all images ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def source(tmp_path):
    """Three classes of 8 pictures of noise, in a folder."""
    for i, image in enumerate(noise(24, 40, 50)):
        file = tmp_path / "data" / "abc"[i % 3] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(hwc(image)).save(file, compress_level=0)  # files of one length
    return read_source(tmp_path / "data")


def same(a, b):
    return a.digest == b.digest and all(
        torch.equal(a.splits[s].x, b.splits[s].x)
        and torch.equal(a.splits[s].y, b.splits[s].y)
        and a.splits[s].files == b.splits[s].files
        for s in a.splits
    )


@pytest.mark.parametrize("fit", ["squash", "crop", "letterbox"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_training_and_predicting_see_the_same_pixels(fit, kept, workers, source, tmp_path):
    calls = []
    data = decode(
        source,
        32,
        fit,
        cache=tmp_path / "cache" if kept else None,
        workers=workers,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(i + 1, 24) for i in range(24)]
    assert (data.size, data.fit, data.classes) == (32, fit, ("a", "b", "c"))
    for split, items in source.splits.items():
        x, y, files = data.splits[split]
        assert (x.dtype, y.dtype, x.shape) == (torch.uint8, torch.int64, (len(y), 3, 32, 32))
        assert (tuple(y.tolist()), files) == (items.labels, items.names)
        for image, file in zip(x, files, strict=True):
            assert torch.equal(image, load_image(source.folder / file, 32, fit))
            assert torch.equal(image, load_image((source.folder / file).read_bytes(), 32, fit))
    assert data.balance() == {
        "train": dict.fromkeys("abc", 5),
        "val": dict.fromkeys("abc", 1),
        "test": dict.fromkeys("abc", 2),
    }
    assert (data.unreadable, data.duplicates, data.notes) == ((), (), ())


def test_the_background_is_in_every_split_and_in_the_record(tmp_path):
    rgba = np.random.default_rng(0).integers(0, 256, (12, 20, 30, 4), np.uint8)
    for i, pixels in enumerate(rgba):
        file = tmp_path / "data" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    source = read_source(tmp_path / "data")
    made = [decode(source, 16, "letterbox", b) for b in ("white", "black", None)]
    assert len({data.digest for data in made}) == 3
    assert [data.background for data in made] == ["#ffffff", "#000000", None]
    for data in made:
        assert data.preprocessing == {
            "size": 16,
            "fit": "letterbox",
            "background": data.background,
            "resize": "bilinear, antialias",
        }
        for x, _, files in data.splits.values():
            for image, file in zip(x, files, strict=True):
                alone = load_image(source.folder / file, 16, "letterbox", data.background)
                assert torch.equal(image, alone)


def test_rows_of_an_npz_are_decoded_like_files(source, tmp_path):
    x, y = noise(24, 40, 50).numpy(), np.arange(24) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = decode(read_source(tmp_path / "a.npz"), 32, cache=tmp_path / "cache")
    for images, labels, files in data.splits.values():
        for image, label, file in zip(images, labels, files, strict=True):
            i = int(file[2:-1])
            assert label == y[i]
            assert torch.equal(image, fit_image(torch.from_numpy(x[i]), 32))


@pytest.mark.parametrize(
    ("sides", "limit", "size"),
    [([28] * 4, 224, 64), ([70, 90, 97, 500], 224, 96), ([97] * 4, 224, 128), ([900] * 4, 224, 224),
     ([900] * 4, 72, 72), ([20] * 4, 32, 32)],
)  # fmt: skip
def test_the_size_follows_the_median_shorter_side(sides, limit, size, tmp_path):
    for i, side in enumerate(sides):
        for name in ("a", "b"):
            (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (side, side + 40)).save(tmp_path / "train" / name / f"{i}.png")
    (tmp_path / "val" / "a").mkdir(parents=True)
    Image.new("L", (2000, 2000)).save(tmp_path / "val" / "a" / "1.png")  # does not count
    assert decode(read_source(tmp_path), size_limit=limit).size == size


def test_equal_images_in_two_splits_are_named(source, tmp_path):
    train, test = (source.splits[s].names[0] for s in ("train", "test"))
    Image.open(source.folder / train).save(source.folder / test)
    Image.open(source.folder / train).save(source.folder / source.splits["train"].names[1])
    assert decode(source, 32).duplicates == ((train, test),)


def test_the_digest_is_of_pixels_labels_and_classes(source):
    data = decode(source, 32)
    assert decode(source, 32, workers=1).digest == data.digest
    assert len({data.digest, decode(source, 40).digest, decode(source, 32, "crop").digest}) == 3
    test = source.splits["test"]
    swapped = {**source.splits, "test": Items(test.names, test.labels[::-1])}
    for change in ({"classes": ("a", "b", "x")}, {"splits": swapped}):
        assert decode(dataclasses.replace(source, **change), 32).digest != data.digest


# ── unreadable images ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def broken(source):
    """The same source, but two of the 24 files are not images."""
    (source.folder / "a" / "0.png").write_text("no image")
    (source.folder / "b" / "1.png").write_bytes(b"")
    return source


def test_a_few_unreadable_images_are_left_out_and_listed(broken, tmp_path):
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        data = decode(broken, 32, limit=0.1, cache=cache)
        assert [file for file, _ in sorted(data.unreadable)] == ["a/0.png", "b/1.png"]
        assert dict(data.unreadable)["b/1.png"].startswith("not an image: the file is empty")
        assert sum(len(images.y) for images in data.splits.values()) == 22
        for x, y, files in data.splits.values():
            assert len(x) == len(y) == len(files)
            for image, label, file in zip(x, y, files, strict=True):
                assert torch.equal(image, load_image(broken.folder / file, 32))
                assert "abc"[label] == file[0]


def test_more_of_them_are_an_error_and_so_is_the_first_when_strict(broken, tmp_path):
    with pytest.raises(CovNormError, match=r"data: 2 of 24 .* than 8% .*remove them: \w/\d.png: "):
        decode(broken, 32, limit=0.08)
    decode(broken, 32, limit=0.1, cache=tmp_path / "cache")
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(CovNormError, match=r"data: (a/0|b/1)\.png: not an image"):
            decode(broken, 32, strict=True, cache=cache)


def test_a_repaired_image_is_read_again(source, tmp_path):
    """Even if size and time are unchanged, as after chmod or a disk failure."""
    file = source.folder / "a" / "0.png"
    good, before = file.read_bytes(), file.stat()
    for data, bad in ((bytes(len(good)), 1), (good, 0)):
        file.write_bytes(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert len(decode(source, 32, cache=tmp_path / "cache").unreadable) == bad


def test_a_class_or_a_split_without_a_readable_image_is_an_error(source):
    for split in ("train", "test"):
        (source.folder / split / "d").mkdir(parents=True)
    for name in "abc":
        (source.folder / name).rename(source.folder / "train" / name)
    for split, message in (("train", "class 'd' in train has"), ("test", "split 'test' has")):
        (source.folder / split / "d" / "bad.png").write_text("no image")
        with pytest.raises(
            CovNormError, match=rf"{message} no readable image.*d/bad\.png: not an image"
        ):
            decode(read_source(source.folder), 32, limit=0.5)
        Image.new("RGB", (9, 9)).save(source.folder / split / "d" / "bad.png")


# ── the cache ───────────────────────────────────────────────────────────────────────────────────


def names(cache):
    return sorted(file.name for file in cache.iterdir())


def test_a_second_call_reads_no_image(source, tmp_path):
    cache, calls = tmp_path / "cache", []
    first = decode(source, 32, cache=cache)
    file = source.folder / source.splits["train"].names[0]
    before = file.stat()
    file.write_bytes(bytes(before.st_size))  # not an image now, but with the same size and time
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = decode(source, 32, cache=cache, progress=lambda *at: calls.append(at))
    assert same(first, again)
    assert calls == [(15, 24), (18, 24), (24, 24)]
    with pytest.raises(CovNormError, match=r"not an image"):  # control: these must be read
        decode(source, 33, cache=cache, strict=True)


def test_the_cache_depends_on_everything_that_the_pixels_come_from(source, tmp_path):
    cache = tmp_path / "cache"
    decode(source, 32, cache=cache)
    assert len(names(cache)) == 3
    decode(source, 32, "crop", cache=cache)
    decode(source, 40, cache=cache)
    assert len(names(cache)) == 9
    decode(source, 40, background="#FFFFFF", cache=cache)  # white in another spelling
    assert len(names(cache)) == 9
    for background in ("black", None):
        decode(source, 40, background=background, cache=cache)
    assert len(names(cache)) == 15
    file = source.folder / source.splits["test"].names[0]
    os.utime(file, ns=(0, 12345))  # another time, in only one split
    decode(source, 32, cache=cache)
    assert len(names(cache)) == 16
    copy = tmp_path / "other"  # unpacked archives may agree in every name, size and time
    subprocess.run(["cp", "-a", source.folder, copy], check=True)
    (copy / source.splits["test"].names[0]).write_bytes((copy / "a" / "0.png").read_bytes())
    os.utime(copy / source.splits["test"].names[0], ns=(0, 12345))
    assert not same(decode(read_source(copy), 32, cache=cache), decode(source, 32, cache=cache))


DAMAGES = {
    "cut": lambda b: b[: len(b) // 2],
    "cut in the record": lambda b: b[:-3],
    "empty": lambda b: b[:0],
    "longer": lambda b: b + b"x",
    "a pixel": lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:],
    "the header": lambda b: b[:70] + b"9" + b[71:],
    "the record": lambda b: b.replace(b'"unreadable": {', b'"unreadable": {"3": "x"'),
    "the seal": lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:],
    "zeros": lambda b: bytes(len(b)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_rebuilt(damage, source, tmp_path):
    cache = tmp_path / "cache"
    first = decode(source, 32, cache=cache)
    good = {file: file.read_bytes() for file in cache.iterdir()}
    first = decode(source, 32)
    for file, data in good.items():
        assert damage(data) != data
        file.unlink()  # so that the memory map of the first call is not changed
        file.write_bytes(damage(data))
    assert same(decode(source, 32, cache=cache), first)
    assert {file: file.read_bytes() for file in cache.iterdir()} == good


def test_a_tensor_of_the_cache_can_be_changed_and_the_file_cannot(source, tmp_path):
    first = decode(source, 32, cache=tmp_path / "cache")
    kept = {file: file.read_bytes() for file in (tmp_path / "cache").iterdir()}
    for images in first.splits.values():
        images.x.zero_()
    assert {file: file.read_bytes() for file in (tmp_path / "cache").iterdir()} == kept
    assert same(decode(source, 32, cache=tmp_path / "cache"), decode(source, 32))


def test_images_larger_than_memory_are_mapped(tmp_path):
    from torch_covnorm.data.cache import open_rows
    from torch_covnorm.data.decode import _tensor

    n = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // (3 * 256 * 256)
    with (tmp_path / "a.npy").open("wb") as stream:
        about = {"descr": "|u1", "fortran_order": False, "shape": (n, 3, 256, 256)}
        np.lib.format.write_array_header_1_0(stream, about)
        stream.truncate(stream.tell() + n * 3 * 256 * 256)  # holes take no room
    assert not _tensor(open_rows(tmp_path / "a.npy"))[n // 2].any()


KILLED = """
import os, signal, sys
from torch_covnorm.data import decode, read_source
def progress(done, total):
    if done == 17:  # in the second split, when the first is complete
        os.kill(os.getpid(), signal.SIGKILL)
decode(read_source(sys.argv[1]), 32, cache=sys.argv[2], progress=progress)
"""


def test_a_killed_call_leaves_nothing_that_stays(source, tmp_path):
    cache = tmp_path / "cache"
    call = [sys.executable, "-c", KILLED, source.folder, cache]
    assert subprocess.run(call, check=False).returncode == -signal.SIGKILL
    assert [name.startswith(".") for name in names(cache)] == [True, False]
    (cache / ".mine").write_text("not ours to remove")
    assert same(decode(source, 32, cache=cache), decode(source, 32))
    assert [name for name in names(cache) if name.startswith(".")] == [".mine"]
    assert len(names(cache)) == 4


def test_two_calls_at_once_do_not_disturb_each_other(source, tmp_path):
    """The second starts in the middle of the first, whose unfinished file must not be removed."""
    cache, answers = tmp_path / "cache", []

    def other(done, total):
        if done == 3:
            thread = threading.Thread(
                target=lambda: answers.append(decode(source, 32, cache=cache))
            )
            thread.start()
            thread.join()

    first = decode(source, 32, cache=cache, progress=other)
    assert same(first, answers[0])
    assert len(names(cache)) == 3
    assert not any(name.startswith(".") for name in names(cache))


def test_an_interrupted_call_removes_what_it_began(source, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode(source, 32, cache=tmp_path / "cache", progress=interrupt)
    assert names(tmp_path / "cache") == []


def test_a_full_disk_is_an_error_that_names_the_file(source, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a write fails as on a full disk
    try:
        with pytest.raises(CovNormError, match=r"cache/[0-9a-f]{32}\.npy: File too large"):
            decode(source, 32, cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path / "cache") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CovNormError, match=r"file/cache: Not a directory\. Choose another"):
        decode(source, 32, cache=tmp_path / "file" / "cache")


@contextlib.contextmanager
def nobody(folder: Path):
    """Work in a folder without root's permission to write anywhere."""
    here = Path.cwd()
    folder.chmod(0o755)
    os.chdir(folder)  # the folders above may not be accessible
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        os.chdir(here)


def test_a_read_only_cache_is_used_and_not_written(source, tmp_path):
    (tmp_path / "cache").mkdir(0o555)
    with nobody(tmp_path):
        data = decode(read_source("data"), 32, cache="cache")
        assert names(Path("cache")) == []
    assert data.notes == ("cache is read-only: nothing is cached there",)
    assert same(data, decode(source, 32))
    (tmp_path / "cache").chmod(0o755)
    decode(source, 32, cache=tmp_path / "cache")
    (tmp_path / "cache").chmod(0o555)
    calls = []
    with nobody(tmp_path):
        decode(read_source("data"), 32, cache="cache", progress=lambda *at: calls.append(at))
    assert len(calls) == 3  # one per split: all cached
