"""Any file that a client sends gives a right prediction or 4xx, never 5xx."""

from __future__ import annotations

import struct
import time
import zlib
from pathlib import Path

import houses
import numpy as np
import pytest
from command import covnorm
from houses import encoded, picture
from PIL import Image
from server import Server, form

from torch_covnorm.ecology import Ecology

RNG = np.random.default_rng(0)
COLOUR = Image.fromarray(RNG.integers(0, 256, (40, 60, 3), np.uint8).repeat(2, 0).repeat(2, 1))


def rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(COLOUR, "JPEG", exif=exif)


def sixteen_bits() -> bytes:
    grey = np.asarray(COLOUR.convert("L")).astype(np.uint16) * 257
    return encoded(Image.fromarray(grey), "PNG")


def animated() -> bytes:
    frames = [COLOUR.rotate(90 * i) for i in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def bomb(side: int, bits: int = 8) -> bytes:
    """Return a small PNG whose header claims side × side pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, bits, 2, 0, 0, 0))
    rows = zlib.compress(bytes(min(side, 4000) * 3 + 1) * 100, 9)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


GOOD = {
    "jpeg": encoded(COLOUR, "JPEG"),
    "cmyk": encoded(COLOUR.convert("CMYK"), "JPEG"),
    "16 bits": sixteen_bits(),
    "grey": encoded(COLOUR.convert("L"), "PNG"),
    "palette": encoded(COLOUR.convert("P"), "PNG"),
    "alpha": encoded(COLOUR.convert("RGBA"), "PNG"),
    "animated gif": animated(),
    "webp": encoded(COLOUR, "WEBP"),
    "bmp": encoded(COLOUR, "BMP"),
    "tiff": encoded(COLOUR, "TIFF"),
    **{f"exif {n}": rotated(n) for n in (1, 3, 6, 8)},
}


@pytest.mark.parametrize("name", GOOD)
def test_an_unusual_image_is_predicted_as_covnorm_predict_does(
    name: str, server: Server, house: Ecology, tmp_path: Path
):
    file = tmp_path / "image"
    file.write_bytes(GOOD[name])
    wanted = covnorm("predict", "coins", file, "--ecology", house.folder, "--json").json[0]
    answer = server.predict("coins", GOOD[name])
    assert answer.status == 200, answer.body
    assert answer.best[0] == wanted["label"]
    assert answer.best[1] == pytest.approx(wanted["probability"], abs=1e-5)


def test_control_the_rotation_matters(server: Server):
    """Otherwise a server that ignores EXIF would pass."""
    sure = {server.predict("coins", rotated(n)).best[1] for n in (1, 3, 6, 8)}
    assert len(sure) == 4
    assert max(sure) - min(sure) > 1e-4


def drawing() -> Image.Image:
    """Return an image whose colors and alpha differ in every pixel, wider than high."""
    return Image.fromarray(RNG.integers(0, 256, (20, 50, 4), np.uint8).repeat(2, 0).repeat(2, 1))


@pytest.mark.parametrize("fit", ["squash", "letterbox"])
def test_alpha_and_letterbox_are_served_as_the_domain_was_made(fit: str, writable, tmp_path: Path):
    """Expected: the picture composited by the formula in float64, without alpha."""
    houses.put(writable.ecology, "posters", fit=fit, background="#0a7fc3", side=48)
    houses.put(writable.ecology, "before", fit=fit, side=48)  # as stores were: alpha is dropped
    pixels = np.asarray(drawing()).astype(np.float64)
    color, a = pixels[..., :3], pixels[..., 3:] / 255
    flat = np.rint(a * color + (1 - a) * np.array([10, 127, 195])).astype(np.uint8)
    images = {"posters": flat, "before": color.astype(np.uint8)}
    alpha, where = encoded(Image.fromarray(pixels.astype(np.uint8))), writable.ecology.folder
    (tmp_path / "alpha.png").write_bytes(alpha)
    for name, opaque in images.items():
        answer = writable.server.predict(name, alpha)
        assert answer.status == 200, answer.body
        equal = writable.server.predict(name, encoded(Image.fromarray(opaque)))
        assert answer.best == (equal.best[0], pytest.approx(equal.best[1], abs=1e-6))
        args = ("predict", name, tmp_path / "alpha.png", "--ecology", where, "--json")
        assert answer.best[1] == pytest.approx(covnorm(*args).json[0]["probability"], abs=1e-5)
        other = images["before" if name == "posters" else "posters"]  # a control
        wrong = writable.server.predict(name, encoded(Image.fromarray(other)))
        assert abs(answer.best[1] - wrong.best[1]) > 1e-4 or answer.best[0] != wrong.best[0]


def whole(side: int) -> bytes:
    """Return a valid PNG of side × side black pixels, one bit each."""
    return encoded(Image.new("1", (side, side)), "PNG")


BAD = {
    "empty": b"",
    "text": b"GET / HTTP/1.1 is no picture\n" * 20,
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>',
    "truncated jpeg": encoded(COLOUR, "JPEG")[:900],
    "truncated png": encoded(COLOUR, "PNG")[:2000],
    "png of one pixel": encoded(Image.new("RGB", (1, 1)), "PNG"),
    "strip": encoded(Image.new("RGB", (1000, 1)), "PNG"),
    "bomb": bomb(60_000),
    "larger bomb": bomb(2**31 - 1),
    "bomb of 16 bits": bomb(9000, 16),
    "just too large": whole(8001),
    "damaged": encoded(COLOUR, "PNG").replace(b"IDAT", b"IDAX"),
    "zeros": bytes(100_000),
    "noise": RNG.bytes(100_000),
    "jpeg's first bytes": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "icon": encoded(COLOUR.resize((32, 32)), "ICO"),
    "postscript": encoded(COLOUR, "EPS"),
    "pdf": encoded(COLOUR, "PDF"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_not_an_image_is_422(name: str, server: Server, photo: bytes):
    answer = server.predict("roses", BAD[name])
    assert (answer.status, answer.reason) == (422, "bad_image"), answer.body
    assert "/" not in answer.message.replace("16/", "")  # no path of the server
    body, headers = form([("image", "x.png", BAD[name])])
    assert server.ask("POST", "/v1/domains/roses/predict", body, headers).status == 422
    assert server.predict("roses", photo).status == 200


def test_the_pixels_are_counted_before_they_are_decoded(server: Server):
    """Decompression bombs cost neither memory nor time. The valid one would take 144 MB."""
    pid, sound = server.process.pid, whole(12_000)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets its peak
    before, start = server.rss(pid, "VmHWM"), time.monotonic()
    for bad in (sound, bomb(60_000)) * 4:
        answer = server.predict("roses", bad)
        assert answer.status == 422
        assert "million pixels" in answer.message
    assert server.rss(pid, "VmHWM") - before < 50_000_000
    assert time.monotonic() - start < 20


def test_a_large_image_within_the_limits_is_predicted(server: Server):
    large = encoded(COLOUR.resize((4000, 3000)), "JPEG", quality=60)
    assert server.predict("coins", large).status == 200


def test_a_body_of_50_mb_is_413(server: Server, photo: bytes):
    answer = server.predict("roses", bytes(50_000_000))
    assert (answer.status, answer.reason) == (413, "too_large")
    connection = server.connect()  # chunked: without a length
    parts = iter([bytes(1_000_000)] * 50)
    connection.request("POST", "/v1/domains/roses/predict", parts, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    body, headers = form([("image", "a.png", bytes(50_000_000))])
    assert server.ask("POST", "/v1/domains/roses/predict", body, headers).status == 413
    assert server.predict("roses", photo).status == 200


def test_a_body_within_the_limit_is_read_completely(server: Server):
    """The limit is on bytes, not on the content: this is an image with many bytes after it."""
    assert server.predict("roses", picture() + bytes(20_000_000)).status == 200


def test_flipped_bytes_never_make_5xx(server: Server):
    rng = np.random.default_rng(1)
    seen = set()
    for name, data in GOOD.items():
        for _ in range(6):
            bad = bytearray(data)
            for place in rng.integers(0, len(bad), 5):
                bad[place] ^= int(rng.integers(1, 256))
            answer = server.predict("coins", bytes(bad))
            assert answer.status in (200, 422), (name, answer.body)
            seen.add(answer.status)
    assert seen == {200, 422}


def test_the_name_of_a_file_is_ignored(server: Server, photo: bytes):
    wanted = server.predict("roses", photo).best
    for name in ("../../etc/passwd", "a.exe", "x" * 3000, "日本.png", "%00", ""):
        body, headers = form([("image", name, photo)])
        assert server.ask("POST", "/v1/domains/roses/predict", body, headers).best == wanted
