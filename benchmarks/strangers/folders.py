"""Make image folders of the data sets: train/ and test/, with one folder per class.

Exact duplicates are kept once, and images with two labels not at all. Test has whole sources. The
training images of a smaller size are among those of a larger one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from ..fetch import cache, members
from .readers import SIDE, STRANGERS, Picture

SIZES = (20, 50, 200)  # training images per class
SEED = b"torch-covnorm strangers 0"
VERSION = 2  # of the folders
Part = dict[str, list[Image.Image]]  # {label: images}


def root() -> Path:
    """Return the folder of all data sets, outside of the project."""
    return cache() / "strangers" / "data"


def folder(name: str, size: int) -> Path | None:
    """Return the folder of a data set with so many training images per class.

    It is made on the first call; None where the packages do not have so many images.
    """
    record = root() / name / "record.json"
    packages = [package.sha256 for package in STRANGERS[name].packages]
    made_of = [VERSION, SEED.decode(), *packages, STRANGERS[name].test, STRANGERS[name].train]
    if not record.exists() or json.loads(record.read_text())["made_of"] != made_of:
        _make(name, made_of)
    found = root() / name / str(size)
    return found if found.exists() else None


def _make(name: str, made_of: list[object]) -> None:
    stranger = STRANGERS[name]
    files = [members(package) for package in stranger.packages]
    print(f"making the image folders of {name}", flush=True)
    train, test = split(stranger.read(*files), stranger.test, stranger.train)
    shutil.rmtree(root() / name, ignore_errors=True)
    fewest = min(map(len, train.values()))
    for size in SIZES:
        if size <= fewest:
            _write(root() / name / str(size) / "train", {k: v[:size] for k, v in train.items()})
            _write(root() / name / str(size) / "test", test)
    parts = {"train": train, "test": test}
    counts = {k: {label: len(v) for label, v in part.items()} for k, part in parts.items()}
    record = json.dumps({"made_of": made_of, "images": counts}, indent=1)
    (root() / name / "record.json").write_text(record + "\n")


def split(pictures: Iterable[Picture], test: int, keep: int) -> tuple[Part, Part]:
    """Return train and test images by class, each in an order by hash.

    Sources go to test, in an order by hash, until a class has `test` images there or would keep
    fewer than `keep` for training. At most half of the test images are of one source; the rest of
    such a source is left out.
    """
    found: dict[bytes, Picture] = {}
    doubtful = set()
    for picture in pictures:
        picture = picture._replace(image=shrunk(picture.image))
        key = _hash(picture.image.tobytes())
        if found.setdefault(key, picture).label != picture.label:
            doubtful.add(key)
    sources: dict[str, dict[bytes, list[Image.Image]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(found.keys() - doubtful):
        label, source, image = found[key]
        sources[label][_hash(source.encode())].append(image)
    train, held = defaultdict(list), defaultdict(list)
    for label in sorted(sources):
        left = sum(map(len, sources[label].values()))
        for _, images in sorted(sources[label].items()):
            if (missing := test - len(held[label])) and left - len(images) >= keep:
                left -= len(images)
                held[label] += images[: min(missing, -(-test // 2))]
            else:
                train[label] += images
    for part in (train, held):
        for images in part.values():
            images.sort(key=lambda image: _hash(image.tobytes()))
    return dict(train), dict(held)


def shrunk(image: Image.Image) -> Image.Image:
    """Resize so that the shorter side is 64 pixels."""
    scale = SIDE / min(image.size)
    size = (max(SIDE, round(image.width * scale)), max(SIDE, round(image.height * scale)))
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(SEED + content).digest()


def _write(place: Path, part: Part) -> None:
    for label, images in part.items():
        inside = place / label
        inside.mkdir(parents=True)
        for i, image in enumerate(images):
            image.save(inside / f"{i:03}.png")
