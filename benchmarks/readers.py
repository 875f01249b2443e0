"""Read the images of a package: decoded, without duplicates, in train and test parts.

The order follows hashes of a seed and the images, so the order of the files does not matter, and
two runs give the same result (with the same Pillow, numpy and zlib).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from PIL import Image, ImageOps

from torch_covnorm.errors import CovNormError

SEED = b"torch-covnorm samples 0"
CLASSES: dict[str, tuple[str, ...]] = {
    "objects": (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    "products": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "digits": tuple("0123456789"),
    "sketches": (
        *("airplane", "apple", "bicycle", "butterfly", "car", "cat", "clock", "envelope"),
        *("eyeglasses", "fish", "flower", "guitar", "house", "ice cream", "key", "mushroom"),
        *("snowman", "star", "tree", "umbrella"),
    ),
    "drawings": (
        *("animals", "computer", "food", "geography", "office", "people", "shapes"),
        *("signs_and_symbols", "tools", "transportation"),
    ),
    "solar": (
        "defect 0",
        "defect 1/3",
        "defect 2/3",
        "defect 1",
    ),  # probability of a defect, by experts
    "faces": tuple(f"s{i}" for i in range(1, 41)),
}
NEAR_COPIES = ("shapes/stars/", "tools/weapons/", "people/clothing/pantyhose/")
BROKEN = ("people/stylized_yoga_person",)  # drawn as "Linked Image Not Found"
NO_VEHICLES = ("transportation/aiga-symbols/", "transportation/roadsigns/")
MAX_PIXELS = 16_000_000  # a few drawings have up to 600 million
MIN_INK = 50  # in black pixels
SIDE = 64  # to which larger images are scaled

Files = dict[str, bytes]
Pool = dict[bytes, tuple[np.ndarray, int]]  # {hash: (image, label)}
Parts = tuple[Pool, Pool]  # train, test


def pool(pairs: Iterable[tuple[np.ndarray, int]]) -> Pool:
    """Keep duplicates once, drop images with two labels, and order by a seeded hash."""
    found: Pool = {}
    doubtful = set()
    for image, label in pairs:
        key = hashlib.sha256(SEED + image.tobytes()).digest()
        if found.setdefault(key, (image, int(label)))[1] != label:
            doubtful.add(key)
    return {key: found[key] for key in sorted(found.keys() - doubtful)}


def sizes(images: Pool) -> dict[int, int]:
    """Return {label: number of images}."""
    return dict(Counter(label for _, label in images.values()))


def take(images: Pool, quota: dict[int, int]) -> Pool:
    """Take up to ``quota[label]`` images of each class, in rounds of one per class."""
    count: Counter[int] = Counter()
    rounds = []
    for key, (_, label) in images.items():
        count[label] += 1
        if count[label] <= quota[label]:
            rounds.append((count[label], key))
    return {key: images[key] for _, key in sorted(rounds)}


def without(images: Pool, others: Pool) -> Pool:
    """Return the images that are not among the others."""
    return {key: pair for key, pair in images.items() if key not in others}


def cut(images: Pool, percent: int) -> Parts:
    """Split off `percent` of each class (rounded up) as test; return train and test."""
    test = take(images, {label: -(-n * percent // 100) for label, n in sizes(images).items()})
    return without(images, test), test


# ── one format each ─────────────────────────────────────────────────────────────────────────────


def idx(blob: bytes) -> np.ndarray:
    """Read an idx file of bytes, gzipped or not: 0, 0, 8 (uint8), rank, sizes (>u4), values."""
    blob = gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob
    if blob[:3] != b"\0\0\x08":
        raise CovNormError(
            f"not an idx file of bytes: it starts with {blob[:4]!r}. Fetch it again."
        )
    shape = struct.unpack_from(f">{blob[3]}I", blob, 4)
    return np.frombuffer(blob, np.uint8, offset=4 + 4 * blob[3]).reshape(shape)


def official(files: Files) -> Parts:
    """Read MNIST and similar (28×28, light on black); train excludes images of the test part."""
    blobs = {path.removesuffix(".gz"): blob for path, blob in files.items()}
    parts = []
    for part in ("train", "t10k"):
        images, labels = (blobs[f"{part}-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
        parts.append(pool(zip(idx(images), idx(labels), strict=True)))
    train, test = parts
    return without(train, test), test


def objects(files: Files) -> Parts:
    """Read CIFAR-10: one PNG per batch, one image of 32×32 RGB pixels per row.

    Train excludes images of the test part. "lables" is the spelling of the files.
    """
    parts = []
    for part, start in (("train", "data_batch_"), ("test", "test_batch")):
        batches = [_pixels(files[path]) for path in sorted(files) if path.startswith(start)]
        rows = np.concatenate(batches).reshape(-1, 32, 32, 3)
        parts.append(pool(zip(rows, json.loads(files[f"{part}_lables.json"]), strict=True)))
    train, test = parts
    return without(train, test), test


def sketches(files: Files, percent: int = 20) -> Parts:
    """Read Quick, Draw!: 28×28 with the drawing top left, here centred on 32×32, on white."""
    pairs = []
    for label, name in enumerate(CLASSES["sketches"]):
        for line in gzip.decompress(files[f"{name}.ndjson.gz"]).splitlines():
            ink = np.array(json.loads(line)).reshape(28, 28)
            image = on_white(Image.fromarray(np.rint(255 - 255 * ink).astype(np.uint8)), 32)
            if image is not None and ink.sum() >= MIN_INK:
                pairs.append((image, label))
    return cut(pool(pairs), percent)


def drawings(files: Files) -> Parts:
    """Read Open Clip Art: 64×64 RGB on white; the folder is the label."""
    label = {folder: i for i, folder in enumerate(CLASSES["drawings"])}
    pairs = []
    for path, blob in files.items():
        if (folder := path.split("/")[0]) not in label:
            continue
        width, height = struct.unpack_from(">II", blob, 16)  # without decoding it
        if path.startswith(NEAR_COPIES + BROKEN + NO_VEHICLES) or width * height > MAX_PIXELS:
            continue
        drawn = Image.open(io.BytesIO(blob)).convert("RGBA")
        drawn = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn)
        image = on_white(drawn.convert("RGB"), SIDE)
        if image is not None:
            pairs.append((image, label[folder]))
    return cut(pool(pairs), 25)


def solar(files: Files) -> Parts:
    """Read ELPV: grey cells of 300×300, here 64×64. Label lines: path, probability, type."""
    pairs = []
    for line in files["labels.csv"].decode().splitlines():
        path, probability, _ = line.split()
        pairs.append((_pixels(files[path], SIDE), round(3 * float(probability))))
    return cut(pool(pairs), 25)


def faces(files: Files) -> Parts:
    """Read ORL: ten grey pictures of 92×112 per person, here 64×64, three of them for test."""
    pairs = [
        (_pixels(files[f"{person}/{i}.pgm"], SIDE), label)
        for label, person in enumerate(CLASSES["faces"])
        for i in range(1, 11)
    ]
    return cut(pool(pairs), 30)


READERS: dict[str, Callable[[Files], Parts]] = {
    "objects": objects,
    "products": official,
    "digits": official,
    "sketches": sketches,
    "drawings": drawings,
    "solar": solar,
    "faces": faces,
}


def on_white(image: Image.Image, size: int) -> np.ndarray | None:
    """Crop to the drawing, scale and centre it: (size, size[, 3]), or None if empty."""
    box = ImageOps.invert(image).point(lambda v: 255 * (v > 5)).getbbox()
    image = image.crop(box)
    if box is None or min(image.size) * size < max(image.size):
        return None  # empty, or thinner than a pixel
    image = ImageOps.pad(image, (size - 4, size - 4), Image.Resampling.BILINEAR, color="white")
    return np.asarray(ImageOps.expand(image, 2, fill="white"))


def _pixels(blob: bytes, side: int | None = None) -> np.ndarray:
    """Decode to (h, w[, 3]), or resize to (side, side[, 3]), averaging over each pixel."""
    image = Image.open(io.BytesIO(blob))
    if side is None:
        return np.asarray(image)
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
