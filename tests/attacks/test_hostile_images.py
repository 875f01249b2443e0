"""Guarantee 22: unusual images are read correctly, hostile ones are errors, by name and at once."""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torch_covnorm import CovNormError
from torch_covnorm.data import decode, load_image, read_image, read_source
from torch_covnorm.data.image_files import MAX_PIXELS, image_size

# ── unusual images ────────────────────────────────────────────────────────────────────────────────

COLOURS = np.array([[[200, 30, 40], [20, 180, 60]], [[10, 20, 220], [250, 250, 250]]], np.uint8)
GREYS = np.array([[0, 80], [170, 255]], np.uint8)
MODES = {
    "JPEG": ["L", "RGB", "CMYK"],
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "WEBP": ["RGB", "RGBA"],
    "BMP": ["1", "L", "P", "RGB"],
    "TIFF": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I;16B"],
    "PPM": ["1", "L", "RGB", "I"],
    "GIF": ["L", "P"],
}
OPTIONS = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True, "exact": True}}


def blocks(values):
    """2 × 2 values as a picture of 16 × 32: flat parts survive any compression."""
    return np.kron(values, np.ones((8, 16, *[1] * (values.ndim - 2)), np.uint8))


def picture(mode):
    """Return an image in a mode, and its expected pixels: uint8 (h, w, 3)."""
    grey, rgb, alpha = blocks(GREYS), blocks(COLOURS), blocks(255 - GREYS // 2)
    shown = np.stack([grey] * 3, axis=-1)
    if mode == "1":
        return Image.fromarray(grey > 127), 255 * (shown > 127).astype(np.uint8)
    if mode in ("I;16", "I;16B", "I"):
        deep = (grey.astype(np.uint16) << 8) + 77
        dtype = {"I;16": "<u2", "I;16B": ">u2", "I": np.int32}[mode]
        return Image.fromarray(deep.astype(dtype)), shown
    if mode == "P":
        image = Image.fromarray(blocks(np.array([[0, 1], [2, 3]], np.uint8)), "P")
        image.putpalette(COLOURS.reshape(-1).tolist())
        return image, rgb
    if mode == "CMYK":  # no black: complements
        return Image.fromarray(np.dstack([255 - rgb, 0 * grey]), "CMYK"), rgb
    arrays = {
        "L": grey,
        "LA": np.dstack([grey, alpha]),
        "RGB": rgb,
        "RGBA": np.dstack([rgb, alpha]),
    }
    return Image.fromarray(arrays[mode]), shown if mode in ("L", "LA") else rgb


def saved(image, fmt, **options):
    stream = io.BytesIO()
    image.save(stream, fmt, **{**OPTIONS.get(fmt, {}), **options})
    return stream.getvalue()


def hwc(tensor):
    return tensor.permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("fmt", "mode"), [(f, m) for f in MODES for m in MODES[f]])
def test_every_format_and_mode_gives_the_picture(fmt, mode, tmp_path):
    image, shown = picture(mode)
    assert image.mode == mode
    data = saved(image, fmt)
    (tmp_path / "a.xyz").write_bytes(data)  # the content decides, whatever the name
    read = read_image(tmp_path / "a.xyz", background=None)
    assert np.abs(hwc(read).astype(int) - shown).max() <= (3 if fmt == "JPEG" else 0)
    assert torch.equal(read, read_image(data, background=None, name="from memory"))
    assert torch.equal(read, read_image(data)) == (mode not in ("LA", "RGBA"))


def png(depth, colour, rows):
    """A PNG by hand, for what Pillow does not write."""
    h, w = rows.shape[:2]
    body = b"".join(b"\0" + row.astype(f">u{depth // 8}").tobytes() for row in rows)
    head = struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(body)), (b"IEND", b"")]
    chunk = (
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk)


def tiff(bits, photometric, w, h, data):
    """A grey TIFF by hand: little-endian, one strip, not compressed."""
    tags = {256: w, 257: h, 258: bits, 259: 1, 262: photometric, 273: 130, 277: 1, 278: h}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    entries.append(struct.pack("<HHII", 279, 4, 1, len(data)))
    head = b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    return head.ljust(130, b"\0") + data


def test_sixteen_bits_give_their_upper_eight():
    deep = np.random.default_rng(0).integers(0, 2**16, (9, 10, 4), dtype=np.uint16)
    grey = (deep[..., :1] >> 8).repeat(3, axis=2)
    assert np.array_equal(hwc(read_image(png(16, 0, deep[..., 0]))), grey)
    assert np.array_equal(hwc(read_image(png(16, 2, deep[..., :3]))), deep[..., :3] >> 8)
    plain = read_image(png(16, 4, deep[..., :2]), background=None)
    assert np.array_equal(hwc(plain), grey)
    plain = read_image(png(16, 6, deep), background=None)
    assert np.array_equal(hwc(plain), deep[..., :3] >> 8)
    pgm = b"P5 10 9 65535\n" + deep[..., 0].astype(">u2").tobytes()
    assert np.array_equal(hwc(read_image(pgm)), grey)
    assert np.array_equal(hwc(read_image(tiff(16, 1, 10, 9, deep[..., 0].tobytes()))), grey)
    white_is_zero = read_image(tiff(16, 0, 10, 9, deep[..., 0].tobytes()))
    assert np.array_equal(hwc(white_is_zero), 255 - grey)


def test_sixteen_bits_with_alpha_are_composited():
    deep = np.random.default_rng(0).integers(0, 2**16, (9, 10, 4), dtype=np.uint16)
    upper = (deep >> 8).astype(np.float64)
    for colour, channels in ((4, [0, 0, 0, 1]), (6, [0, 1, 2, 3])):
        a = upper[..., channels[3:]] / 255
        expected = np.rint(a * upper[..., channels[:3]] + (1 - a) * 255)
        rows = deep[..., : max(channels) + 1]
        assert np.array_equal(hwc(read_image(png(16, colour, rows))), expected)


def test_twelve_bits_give_their_upper_eight():
    deep = np.random.default_rng(0).integers(0, 2**12, (9, 10))
    grey = np.stack([deep >> 4] * 3, axis=-1)
    a, b = deep.reshape(-1, 2).T
    packed = np.stack([a >> 4, (a & 15) << 4 | b >> 8, b & 255], axis=1).astype(np.uint8)
    assert np.array_equal(hwc(read_image(tiff(12, 1, 10, 9, packed.tobytes()))), grey)
    pgm = b"P5 10 9 4095\n" + deep.astype(">u2").tobytes()
    assert np.abs(hwc(read_image(pgm)).astype(int) - grey).max() <= 1  # Pillow scales these


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_fixed_range_are_refused(dtype):
    with pytest.raises(CovNormError, match=r"a\.tif: .*no fixed range\. Save .* 8 bits"):
        read_image(saved(Image.fromarray(np.ones((9, 9), dtype)), "TIFF"), name="a.tif")


@pytest.mark.parametrize("fmt", ["GIF", "TIFF", "WEBP", "PNG"])
def test_the_first_frame_of_many_is_read(fmt):
    frames = [Image.new("RGB", (9, 8), colour) for colour in ("red", "lime", "blue")]
    data = saved(frames[0], fmt, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert read_image(data).flatten(1).unique(dim=1).tolist() == [[255], [0], [0]]


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_every_exif_orientation_is_turned_upright(fmt, orientation):
    image, shown = picture("RGB")
    exif = Image.Exif()
    exif[274] = orientation
    read = hwc(read_image(saved(image, fmt, exif=exif))).astype(int)
    expected = UPRIGHT[orientation](shown)
    assert read.shape == expected.shape
    assert np.abs(read - expected).max() <= 3
    if orientation > 1:  # control: the picture has no symmetry that hides a turn
        assert shown.shape != expected.shape or np.abs(expected.astype(int) - shown).max() > 100


def test_metadata_that_cannot_be_read_spoils_no_pixels():
    image, shown = picture("RGB")
    for exif in (b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0" * 9, b"Exif\0\0MM", b"x"):
        assert np.array_equal(hwc(read_image(saved(image, "PNG", exif=exif))), shown)


# ── hostile files ───────────────────────────────────────────────────────────────────────────────


def bomb(w, h):
    """A PNG of a few hundred bytes that claims w × h pixels."""
    data = png(8, 0, np.zeros((9, 9), np.uint8))
    head = data[12:16] + struct.pack(">II", w, h) + data[24:29]
    return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]


GOOD = saved(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), "JPEG"
)
HOSTILE = {
    "text": (b"Dear computer, I am no image." * 9, "not an image: the content is not JPEG"),
    "nothing": (b"", "the file is empty"),
    "HTML": (b"<html><script>alert(1)</script></html>", "not an image"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage", "not an image"),
    "icon": (saved(Image.new("RGB", (16, 16)), "ICO"), "the content is not JPEG"),
    "truncated JPEG": (GOOD[: len(GOOD) // 2], "truncated"),
    "only a header": (GOOD[:20], "not an image"),
    "bomb": (bomb(50_000, 50_000), "limit is 64 million pixels"),
    "bomb that Pillow warns about": (bomb(10_000, 9_500), "9500 × 10000 .* 64 million"),
    "bomb that Pillow lets pass": (bomb(8_001, 8_000), "8000 × 8001 .* 64 million"),
    "no width": (bomb(0, 9), "not an image"),
    "huge PPM": (b"P6 99999 99999 255\n", "64 million"),
    "GIF frame": (b"GIF89a\1\0\1\0\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x01", "64 million"),
    "BMP bomb": (b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24,
                                     *[0] * 6), "64 million"),
    "truncated PPM": (b"P6 90 90 255\nabc", "truncated|not enough"),
    "float PFM": (b"Pf\n9 9\n-1.0\n" + bytes(9 * 9 * 4), "no fixed range"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_refused_by_name_at_once(data, message, tmp_path):
    start = time.perf_counter()
    with pytest.raises(CovNormError, match=rf"^upload 7: .*({message})"):
        read_image(data, name="upload 7")
    (tmp_path / "a.jpg").write_bytes(data)
    with pytest.raises(CovNormError, match=rf"a\.jpg: .*({message})"):
        read_image(tmp_path / "a.jpg")
    assert time.perf_counter() - start < 2


def test_the_largest_image_is_known_from_its_header():
    assert image_size(bomb(8_000, 8_000)) == (8_000, 8_000)
    assert MAX_PIXELS == 8_000 * 8_000


def test_small_images_are_refused_where_a_network_would_read_them():
    small = saved(Image.new("RGB", (7, 20)), "PNG")
    with pytest.raises(CovNormError, match=r"tiny: 20 × 7 pixels: at least 8 per side are needed"):
        load_image(small, 32, name="tiny")
    assert read_image(small).shape == (3, 20, 7)
    assert load_image(saved(Image.new("RGB", (8, 8)), "PNG"), 32).shape == (3, 32, 32)


def test_only_regular_files_are_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "to pipe.jpg").symlink_to("pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    messages = {
        tmp_path / "pipe.jpg": "not an image but a pipe",
        tmp_path / "to pipe.jpg": "not an image but a pipe",
        Path("/dev/zero"): "not an image but a pipe, socket or device",
        tmp_path / "folder.jpg": "not an image but a folder",
        tmp_path / "loop.jpg": "cannot be read .*symbolic links",
        tmp_path / "gone.jpg": "no such image",
        tmp_path / "gone.jpg" / "x": "no such image|Not a directory",
        tmp_path / ("x" * 999): "cannot be read .*too long",
        tmp_path / "a\0b.jpg": "null",
    }
    for file, message in messages.items():
        with pytest.raises(CovNormError, match=message) as caught:
            read_image(file)
        assert str(caught.value).startswith(f"{file}: ")


def test_a_pipe_that_takes_the_file_s_place_is_not_waited_for(tmp_path, monkeypatch):
    file = tmp_path / "a.jpg"
    file.write_bytes(GOOD)
    before = file.stat()
    file.unlink()
    os.mkfifo(file)
    monkeypatch.setattr(Path, "stat", lambda _: before)  # as it was a moment ago
    with pytest.raises(CovNormError, match=r"a\.jpg: .*empty"):
        read_image(file)


def test_bytes_changed_at_random_are_read_or_refused(capfd):
    """There is never another exception, a warning, or a long wait."""
    rng, slowest, refused = random.Random(0), 0.0, 0
    good = [
        saved(picture(mode)[0], fmt, **({"compression": "tiff_lzw"} if mode == "LA" else {}))
        for fmt, modes in MODES.items()
        for mode in modes
    ]
    for _ in range(3000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.choice([1, 2, 9])):
            data[rng.randrange(min(len(data), rng.choice([60, 9999])))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        start = time.perf_counter()
        try:
            image = read_image(bytes(data))
            assert (image.dtype, len(image)) == (torch.uint8, 3)
        except CovNormError:
            refused += 1
        slowest = max(slowest, time.perf_counter() - start)
    assert 300 < refused < 2900  # some of both
    assert slowest < 5
    capfd.readouterr()  # libtiff prints to stderr


def test_no_warning_leaks_from_any_thread_and_the_filters_stay():
    before = warnings.filters[:]
    data = [bomb(10_000, 9_500), GOOD, saved(picture("RGB")[0], "TIFF")[:-40]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Image.open(io.BytesIO(data[0]))
        assert len(caught) == 1  # control: Pillow does warn

        def read():
            for i in range(60):
                with contextlib.suppress(CovNormError):
                    read_image(data[i % 3])

        caught.clear()
        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not caught
        warnings.warn("still heard", stacklevel=1)
        assert len(caught) == 1
    assert warnings.filters == before


# ── hostile sources ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pictures(tmp_path):
    """Two classes of 20 pictures each."""
    for i in range(40):
        file = tmp_path / "data" / "ab"[i % 2] / f"{i:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (i, 0, 0)).save(file)
    return tmp_path / "data"


def test_a_file_without_permission_is_listed(pictures, tmp_path, monkeypatch):
    (pictures / "a" / "02.png").chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)  # root may read everything
        data = decode(read_source("data"), 32)
    finally:
        os.seteuid(user)
    assert data.unreadable == (("a/02.png", "cannot be read (Permission denied)"),)


def test_paths_of_a_csv_are_files_or_listed(pictures, tmp_path):
    os.mkfifo(pictures / "pipe")
    tricks = [
        "/dev/zero",
        "pipe",
        "../nowhere.png",
        ".",
        "a\0b.png",
        "~/x.png",
        "a/*.png",
        "/etc/passwd",
    ]
    good = [f"a/{i:02}.png" for i in range(2, 40, 2)]
    good += [str(pictures / "b" / f"{i:02}.png") for i in range(3, 40, 2)]  # absolute
    good += [f"../data/b/../a/{i:02}.png" for i in (2, 4)]
    rows = [f'"{name}",{k % 2},train' for k, name in enumerate(good + tricks)]
    (pictures / "list.csv").write_text("\n".join(rows))
    data = decode(read_source(pictures / "list.csv"), 32, limit=0.2, cache=tmp_path / "cache")
    assert {file for file, _ in data.unreadable} == set(tricks)
    assert sum(len(images.y) for images in data.splits.values()) == len(good)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_an_archive_of_arrays_runs_no_code_and_is_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    y, x = np.arange(4) % 2, np.zeros((4, 8, 8), np.uint8)
    np.savez("objects.npz", x=np.array([Evil()] * 4, dtype=object), y=y)
    np.savez("labels.npz", x=x, y=np.array([Evil()] * 4, dtype=object))
    np.savez("good.npz", x=x, y=y)
    good = Path("good.npz").read_bytes()
    Path("cut.npz").write_bytes(good[:300])
    Path("flipped.npz").write_bytes(good[:200] + b"\xff" + good[201:])
    Path("lies.npz").write_bytes(good.replace(b"(4, 8, 8)", b"(9**9,8) "))
    Path("text.npz").write_text("no archive")
    Path("empty.npz").write_bytes(b"")
    np.save("array.npy", x)
    Path("array.npy").rename("array.npz")
    bad = [file.name for file in Path().iterdir() if file.name != "good.npz"]
    assert len(bad) == 8
    for name in bad:
        with pytest.raises(CovNormError, match=rf"^{name}: cannot be read"):
            read_source(name)
    assert not Path("evil").exists()
    assert len(read_source("good.npz").classes) == 2
