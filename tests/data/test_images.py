"""Reading, resizing, cropping and flipping single images and batches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from torch_covnorm import CovNormError
from torch_covnorm.data import (
    Augment,
    Rule,
    centre_crop,
    channel_statistics,
    normalise,
    random_crop,
    random_flip,
    read_image,
    resize,
)
from torch_covnorm.data.images import check_statistics


def noise(h, w, channels=3, seed=0):
    shape = (h, w, channels) if channels > 1 else (h, w)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def chw(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)


def numbered(n, h, w, c=3, dtype=torch.float32):
    """Give every pixel of every sample a different number."""
    return torch.arange(n * c * h * w).reshape(n, c, h, w).to(dtype)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def test_an_rgb_file_is_read_to_the_pixel(tmp_path):
    pixels = noise(5, 7)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png")
    assert image.dtype == torch.uint8
    assert image.shape == (3, 5, 7)
    assert torch.equal(image, chw(pixels))
    assert image.is_contiguous()
    image.zero_()  # its own memory


def test_a_jpeg_is_read_as_pillow_reads_it(tmp_path):
    Image.fromarray(noise(20, 30)).save(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        assert torch.equal(read_image(str(tmp_path / "a.jpg")), chw(np.array(image)))


@pytest.mark.parametrize("mode", ["L", "1", "LA", "I;16"])
def test_grey_becomes_three_equal_channels(mode, tmp_path):
    grey = noise(6, 4, channels=1)
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        image = Image.fromarray(grey).convert(mode)
    assert image.mode == mode
    image.save(tmp_path / "a.png")
    read = read_image(tmp_path / "a.png")
    expected = np.array(image.convert("L")) if mode == "1" else grey
    assert torch.equal(read, torch.from_numpy(expected).expand(3, -1, -1))


@pytest.mark.parametrize("transparency", [None, 0, bytes([0, 128, 255])])
def test_a_palette_is_looked_up_with_or_without_transparency(transparency, tmp_path):
    image = Image.new("P", (3, 1))
    image.putpalette([9, 8, 7, 60, 50, 40, 200, 210, 220])
    image.putdata([2, 0, 1])
    options = {} if transparency is None else {"transparency": transparency}
    image.save(tmp_path / "a.png", **options)
    read = read_image(tmp_path / "a.png", background=None)
    assert read[:, 0].T.tolist() == [[200, 210, 220], [9, 8, 7], [60, 50, 40]]


def over(color, alpha, background):
    """Porter and Duff's "over" on an opaque background, in float64: (h, w, 3), (h, w) → uint8."""
    a = alpha[..., None] / 255.0
    return np.rint(a * color + (1 - a) * np.array(background, np.float64)).astype(np.uint8)


BACKGROUNDS = {
    "white": (255, 255, 255),
    "gray": (128, 128, 128),
    "black": (0, 0, 0),
    "#0A7fC3": (10, 127, 195),
}


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_alpha_is_composited_for_every_color_and_alpha(background, tmp_path):
    alpha, level = np.meshgrid(*[np.arange(256, dtype=np.uint8)] * 2)
    color = np.dstack([level, 255 - level, level // 2])
    Image.fromarray(np.dstack([color, alpha])).save(tmp_path / "a.png")
    expected = chw(over(color, alpha, BACKGROUNDS[background]))
    assert torch.equal(read_image(tmp_path / "a.png", background=background), expected)
    assert torch.equal(read_image(tmp_path / "a.png"), chw(over(color, alpha, (255,) * 3)))
    dropped = read_image(tmp_path / "a.png", background=None)
    assert torch.equal(dropped, chw(color))
    assert torch.equal(dropped, read_image(tmp_path / "a.png", background="none"))


@pytest.mark.parametrize("ending", ["png", "tiff", "webp"])
def test_gray_with_alpha_is_composited(ending, tmp_path):
    grey, alpha = noise(9, 8, channels=1), noise(9, 8, seed=1, channels=1)
    image = Image.fromarray(np.dstack([grey, alpha]))
    assert image.mode == "LA"
    options = {"lossless": True, "exact": True} if ending == "webp" else {}
    image.save(tmp_path / f"a.{ending}", **options)
    expected = over(np.dstack([grey] * 3), alpha, BACKGROUNDS["#0A7fC3"])
    assert torch.equal(read_image(tmp_path / f"a.{ending}", background="#0a7fc3"), chw(expected))


@pytest.mark.parametrize(
    ("transparency", "alpha"), [(0, (0, 255, 255)), (b"\0\x80", (0, 128, 255))]
)
def test_a_palette_with_transparency_is_composited(transparency, alpha, tmp_path):
    colors = np.array([[9, 8, 7], [60, 50, 40], [200, 210, 220]], np.uint8)
    image = Image.new("P", (3, 1))
    image.putpalette(colors.flatten().tolist())
    image.putdata([2, 0, 1])
    image.save(tmp_path / "a.png", transparency=transparency)
    expected = over(colors, np.array(alpha), BACKGROUNDS["gray"])[[2, 0, 1]]
    read = read_image(tmp_path / "a.png", background="gray")
    assert read[:, 0].T.tolist() == expected.tolist()


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "I;16"])
def test_the_one_transparent_color_of_a_png_becomes_the_background(mode, tmp_path):
    grey = np.array([[0, 255, 77]], np.uint8)
    pixels = {"1": grey > 0, "L": grey, "RGB": np.dstack([grey] * 3)}
    image = Image.fromarray(pixels.get(mode, grey.astype(np.uint16) * 256 + 5))
    assert image.mode == mode
    key = {"1": 255, "L": 255, "RGB": (255, 255, 255), "I;16": 255 * 256 + 5}[mode]
    image.save(tmp_path / "a.png", transparency=key)
    read = read_image(tmp_path / "a.png", background="#010203")[:, 0].T.tolist()
    third = [1, 2, 3] if mode == "1" else [77] * 3
    assert read == [[0] * 3, [1, 2, 3], third]
    assert read_image(tmp_path / "a.png", background=None)[0, 0, 1] == 255


def test_a_gif_with_transparency_is_composited(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 40, 50])
    image.putdata([0, 1])
    image.save(tmp_path / "a.gif", transparency=1)
    read = read_image(tmp_path / "a.gif", background="white")
    assert read[:, 0].T.tolist() == [[200, 10, 20], [255] * 3]


@pytest.mark.parametrize("wrong", ["whit", "#fff", "#gggggg", "red", "", 255, (1, 2, 3), ["white"]])
def test_a_background_that_is_not_a_color_is_named(wrong, tmp_path):
    Image.fromarray(noise(4, 4)).save(tmp_path / "a.png")
    with pytest.raises(CovNormError, match=r"background=.*must be white, gray, black, #rrggbb"):
        read_image(tmp_path / "a.png", background=wrong)


def test_files_that_are_not_images_are_named(tmp_path):
    with pytest.raises(CovNormError, match=r"none\.png: no such image"):
        read_image(tmp_path / "none.png")
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(CovNormError, match=r"text\.png: not an image"):
        read_image(tmp_path / "text.png")
    Image.fromarray(noise(64, 64)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:3000])
    with pytest.raises(CovNormError, match=r"cut\.png: not an image"):
        read_image(tmp_path / "cut.png")
    with pytest.raises(CovNormError, match="not an image"):
        read_image(tmp_path)
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(CovNormError, match=r"float\.tiff: .*8 bits"):
        read_image(tmp_path / "float.tiff")


# ── one image ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("h", "w", "size"),
    [
        (144, 200, (72, 100)),
        (200, 144, (100, 72)),
        (31, 50, (72, 116)),
        (300, 401, (72, 96)),  # 96.24: down
        (144, 199, (72, 99)),  # 99.5: down, not to even
        (73, 73, (72, 72)),
    ],
)
def test_resize_is_pillows_bilinear_within_one_level(h, w, size):
    pixels = noise(h, w)
    got = resize(chw(pixels), 72)
    assert got.dtype == torch.uint8
    assert got.shape == (3, *size)
    pillow = chw(np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR)))
    assert (got.int() - pillow.int()).abs().max() <= 1
    assert (got != pillow).float().mean() < 0.02  # rounding once instead of twice: up to 0.2
    if h > 100:  # the negative control: without antialiasing
        plain = F.interpolate(chw(pixels)[None].float(), size=size, mode="bilinear")[0]
        assert (plain - pillow).abs().max() > 20


def test_resize_leaves_the_right_size_alone_and_floats_float():
    image = chw(noise(72, 90))
    assert torch.equal(resize(image, 72), image)
    small = resize(image.short(), 30)  # not bytes: resized as floats
    assert small.dtype == torch.int16
    assert (small - resize(image.float(), 30)).abs().max() <= 0.5
    half = torch.rand(3, 10, 20, dtype=torch.float64)
    assert resize(half, 5).dtype == torch.float64
    assert resize(half, 5).mean() == pytest.approx(float(half.mean()), abs=0.02)


@pytest.mark.parametrize(
    ("h", "w", "top", "left"),
    [(8, 8, 2, 2), (4, 6, 0, 1), (5, 7, 0, 2), (7, 9, 2, 2), (4, 4, 0, 0)],
)
def test_centre_crop_is_the_middle_and_half_a_pixel_goes_to_even(h, w, top, left):
    image = numbered(1, h, w)[0]
    assert torch.equal(centre_crop(image, 4), image[:, top : top + 4, left : left + 4])


def test_random_crops_reach_every_place_and_no_other():
    image = numbered(1, 5, 6, c=1)[0]
    corners = {int(random_crop(image, 4)[0, 0, 0]) for _ in range(300)}
    assert corners == {r * 6 + c for r in (0, 1) for c in (0, 1, 2)}
    crop = random_crop(image, 4)
    assert crop.shape == (1, 4, 4)
    assert torch.equal(crop[0, :, 1:] - crop[0, :, :-1], torch.ones(4, 3))


def test_flips_have_the_given_probability():
    image = numbered(1, 2, 3)[0]
    flips = [torch.equal(random_flip(image), image.flip(-1)) for _ in range(400)]
    assert 150 < sum(flips) < 250
    assert torch.equal(random_flip(image, 0), image)
    assert torch.equal(random_flip(image, 1), image.flip(-1))


def test_a_crop_that_does_not_fit_is_refused():
    for crop in (centre_crop, random_crop):
        with pytest.raises(CovNormError, match="9 × 4"):
            crop(torch.zeros(3, 9, 4), 5)
        with pytest.raises(CovNormError, match="size=0"):
            crop(torch.zeros(3, 9, 4), 0)
    with pytest.raises(CovNormError, match="size"):
        resize(torch.zeros(3, 9, 4), -1)
    with pytest.raises(CovNormError, match=r"\(9, 4\)"):
        resize(torch.zeros(9, 4), 2)


def test_a_rule_varies_only_in_training():
    image = chw(noise(80, 100))
    rule = Rule(resize=40, crop=30)
    centre = centre_crop(resize(image, 40), 30)
    assert all(torch.equal(rule(image, train=False), centre) for _ in range(3))
    seen = {tuple(rule(image, train=True)[:, 0, 0].tolist()) for _ in range(20)}
    assert len(seen) > 5
    still = Rule(resize=40, crop=30, random_crop=False, flip=False)
    assert all(torch.equal(still(image, train=True), centre) for _ in range(5))


def test_normalise_is_the_formula():
    image = chw(noise(4, 5))
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    got = normalise(image, mean, std)
    assert got.dtype == torch.float32
    for c in range(3):
        torch.testing.assert_close(got[c], (image[c] / 255 - mean[c]) / std[c])


# ── statistics ──────────────────────────────────────────────────────────────────────────────────


def two_pass(images):
    """Mean and std (2, 3) of all pixels: mean first, then squares around it."""
    rows = np.concatenate([i.flatten(1).T.numpy() for i in images]).astype(np.float64) / 255
    mean = rows.mean(0)
    return np.stack([mean, np.sqrt(((rows - mean) ** 2).mean(0))])


def test_mean_and_std_are_those_of_all_pixels_by_two_passes():
    images = [chw(noise(9, 13, seed=1)), chw(noise(40, 3, seed=2) // 4), chw(noise(1, 1, seed=3))]
    mean, std = channel_statistics(iter(images))
    expected = two_pass(images)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-13)
    np.testing.assert_allclose(std, expected[1], rtol=1e-12)
    by_image = np.mean([two_pass([i])[0] for i in images], axis=0)  # the mean of the images' means
    assert np.abs(mean - by_image).max() > 0.01
    assert channel_statistics(images[::-1]) == (mean, std)


def test_std_is_exact_where_the_spread_is_tiny():
    """One pixel of a million differs by one level; float32 sums of squares lose it."""
    image = torch.full((3, 1000, 1000), 254, dtype=torch.uint8)
    image[:, 0, 0] = 255
    _, std = channel_statistics([image])
    assert std[0] == pytest.approx((1e-6 * (1 - 1e-6)) ** 0.5 / 255, rel=1e-12)
    x = image[0].float()
    naive = (x.square().mean() - x.mean() ** 2).clamp(min=0).sqrt() / 255
    assert abs(float(naive) - std[0]) > 0.5 * std[0]


def test_statistics_of_nothing_or_of_floats_are_refused():
    with pytest.raises(CovNormError, match="no images"):
        channel_statistics([])
    with pytest.raises(CovNormError, match="uint8"):
        channel_statistics([torch.rand(3, 4, 4)])
    with pytest.raises(CovNormError, match="uint8"):
        channel_statistics([torch.zeros(1, 4, 4, dtype=torch.uint8)])


BAD_STATISTICS = [
    None,
    [],
    {"mean": [0, 0, 0]},
    {"mean": [0, 0], "std": [1, 1]},
    {"mean": [0, 0, 0], "std": [1, 0, 1]},
    {"mean": [0, 0, 0], "std": [1, -1, 1]},
    {"mean": [0, 0, float("nan")], "std": [1, 1, 1]},
    {"mean": "abc", "std": [1, 1, 1]},
    {"mean": [[0, 0, 0]], "std": [1, 1, 1]},
]


@pytest.mark.parametrize("entry", BAD_STATISTICS)
def test_invalid_statistics_are_errors(entry):
    with pytest.raises(CovNormError, match=r"file 'svhn': .*mean"):
        check_statistics(entry, "file 'svhn'")


# ── a batch ─────────────────────────────────────────────────────────────────────────────────────


def find(out, padded):
    """Every (top, left, flipped) at which `out` is a window of `padded`."""
    size = out.shape[-1]
    return [
        (t, k, f)
        for t in range(padded.shape[-2] - size + 1)
        for k in range(padded.shape[-1] - size + 1)
        for f in (False, True)
        if torch.equal(padded[:, t : t + size, k : k + size], out.flip(-1) if f else out)
    ]


@pytest.mark.parametrize(
    ("augment", "mode"),
    [
        (Augment(crop=4), None),
        (Augment(crop=5, padding=2), "constant"),
        (Augment(crop=5, padding=2, fill="reflect"), "reflect"),
        (Augment(crop=5, padding=4, fill="reflect", flip=0), "reflect"),
    ],
)
def test_every_sample_is_a_window_of_its_own_padded_self(augment, mode):
    images = numbered(60, 5, 6) + 1
    p = augment.padding
    padded = F.pad(images, (p, p, p, p), mode=mode) if mode else images
    out = augment(images)
    offsets, flips = set(), set()
    for result, around in zip(out, padded, strict=True):
        hits = find(result, around)
        assert hits
        offsets.add(hits[0][:2])
        flips.update([hits[0][2]] if len(hits) == 1 else [])  # a reflection may look flipped
    h, w = 5 + 2 * p - augment.crop + 1, 6 + 2 * p - augment.crop + 1
    assert len(offsets) > min(h * w, 30) / 2
    assert flips == {False, True} if augment.flip else flips <= {False}


def test_every_offset_is_reached_and_no_direction_is_fixed():
    images = numbered(1, 6, 7, c=1).expand(2000, -1, -1, -1)
    out = Augment(crop=4, flip=0)(images)
    counts = torch.bincount(out[:, 0, 0, 0].long(), minlength=42)
    reached = [r * 7 + c for r in range(3) for c in range(4)]
    assert counts.nonzero().flatten().tolist() == reached
    assert counts[reached].min() > 100  # 167 expected of each


def test_padding_alone_keeps_the_size_and_fills_with_zeros():
    images = numbered(200, 4, 4) + 1
    out = Augment(padding=3, flip=0)(images)
    assert out.shape == images.shape
    assert (out == 0).any()
    assert not (Augment(padding=3, fill="reflect")(images) == 0).any()


def test_outside_is_zero_even_where_the_edge_is_nan():
    images = torch.full((50, 1, 3, 3), float("nan"))
    out = Augment(padding=2, flip=0)(images)
    assert (out == 0).any()
    assert (out.isnan() | (out == 0)).all()


def test_one_sample_is_flipped_and_another_is_not():
    images = numbered(400, 2, 3)
    flipped = (Augment()(images) == images.flip(-1)).flatten(1).all(1)
    same = (Augment()(images) == images).flatten(1).all(1)
    assert 150 < int(flipped.sum()) < 250
    assert same.any()
    assert torch.equal(Augment(flip=0)(images), images)
    assert torch.equal(Augment(flip=1)(images), images.flip(-1))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
)
@pytest.mark.parametrize("fill", ["zeros", "reflect"])
def test_every_dtype_gives_the_same_picture(dtype, fill):
    images = numbered(5, 4, 4, c=1) % 100
    augment = Augment(crop=4, padding=2, fill=fill)
    torch.manual_seed(3)
    expected = augment(images)
    torch.manual_seed(3)
    out = augment(images.to(dtype))
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_is_kept_and_the_input_untouched(fmt):
    images = numbered(4, 6, 6).contiguous(memory_format=fmt)
    before = images.clone()
    out = Augment(crop=4)(images)
    assert out.is_contiguous(memory_format=fmt)
    assert torch.equal(images, before)
    out.zero_()
    assert torch.equal(images, before)


def test_the_global_seed_decides():
    images = numbered(32, 8, 8)
    augment = Augment(crop=6, padding=1)
    torch.manual_seed(7)
    first, second = augment(images), augment(images)
    torch.manual_seed(7)
    assert torch.equal(augment(images), first)
    assert not torch.equal(first, second)
    assert torch.equal(Augment(crop=6, padding=1)(images), second)  # no state of its own


def test_an_empty_batch_stays_empty():
    assert Augment(crop=3)(torch.zeros(0, 3, 5, 5)).shape == (0, 3, 3, 3)


def test_bad_augmentations_are_refused():
    for bad in ({"crop": 0}, {"crop": 2.5}, {"padding": -1}, {"flip": 1.5}, {"flip": float("nan")}):
        with pytest.raises(CovNormError, match=next(iter(bad)) + r"|size"):
            Augment(**bad)
    with pytest.raises(CovNormError, match=r"'reflekt'.*did you mean 'reflect'"):
        Augment(fill="reflekt")
    with pytest.raises(CovNormError, match=r"crop=6 .* 3 pixels high with padding 1"):
        Augment(crop=6, padding=1)(torch.zeros(2, 3, 3, 9))
    with pytest.raises(CovNormError, match=r"wide"):
        Augment(crop=6, padding=1)(torch.zeros(2, 3, 9, 3))
    with pytest.raises(CovNormError, match="reflect"):
        Augment(padding=3, fill="reflect")(torch.zeros(2, 3, 3, 9))
    with pytest.raises(CovNormError, match=r"\(3, 4, 4\)"):
        Augment()(torch.zeros(3, 4, 4))
