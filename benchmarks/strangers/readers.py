"""Read the pictures of a package: what each shows, and which of them belong together.

Pictures of one source (a font, a figure of a game, a micrograph) resemble each other, so a source
is either in train or in test. Classes are chosen by a rule that does not look at any result.
"""

from __future__ import annotations

import io
import json
import re
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps

from ..fetch import Package
from .packages import (
    ARENA,
    CELLS,
    FONTS,
    FURNITURE,
    MATE,
    NOTO,
    OXYGEN,
    TEXTILES,
    TWEMOJI,
    WESNOTH,
)

Files = dict[str, bytes]
CLASSES = 5  # the most of a data set
SIDE = 64
PRIVATE = "\ue123"  # a character that no font has: it is drawn as the sign for a missing one


class Picture(NamedTuple):
    """An image with its class, and the source that it shares with similar ones."""

    label: str
    source: str
    image: Image.Image


class Stranger(NamedTuple):
    """A data set: what it shows, and how its images are divided.

    Attributes:
        packages: the archives that it is made of.
        read: make pictures of the files of each.
        test: the most test images of a class.
        train: training images that each class keeps, where it has so many.
        what: content in words.
        sources: what one source is.
    """

    packages: tuple[Package, ...]
    read: Callable[..., Iterator[Picture]]
    test: int
    train: int
    what: str
    sources: str


def letters(fonts: Files) -> Iterator[Picture]:
    """Draw every fifth letter in each font; fonts that start with the same four letters are one."""
    for path, blob in fonts.items():
        for letter in "AFKPU":
            if (image := _drawn(blob, letter)) is not None:
                yield Picture(letter, path.lower()[:4], image)


def scripts(fonts: Files) -> Iterator[Picture]:
    """Draw the letters of the first five scripts that have enough of them."""
    alphabets: dict[str, list[str]] = defaultdict(list)
    names = {path[8:-12]: path for path in fonts if re.fullmatch(r"NotoSans\w+-Regular.ttf", path)}
    prefixes = {_spaced(script): script for script in names}
    for code in range(0x20000):
        character = chr(code)
        words = unicodedata.name(character, "").split()
        for n in (1, 2):
            script = prefixes.get(" ".join(words[:n]))
            if script and unicodedata.category(character) == "Lo":
                alphabets[script].append(character)
    chosen = sorted(script for script, found in alphabets.items() if len(found) >= 260)
    for script in chosen[:CLASSES]:
        for character in alphabets[script]:
            if (image := _drawn(fonts[names[script]], character)) is not None:
                yield Picture(script, character, image)


def emoji(files: Files) -> Iterator[Picture]:
    """Read the five largest groups but people (mostly variants) and flags."""
    left_out = ("People & Body", "Flags", "Component")
    about = [e for e in json.loads(files["emoji.json"]) if e["category"] not in left_out]
    for label in _most_frequent(e["category"] for e in about):
        for e in about:
            blob = files.get(f"img/twitter/64/{e['image']}")
            if e["category"] == label and blob:
                yield Picture(label, re.split(r"[_\d-]", e["short_name"])[0], _opened(blob))


def icons(*themes: Files) -> Iterator[Picture]:
    """Read five kinds of icons; an icon and its variants in both themes are one source."""
    kinds = ("actions", "apps", "devices", "mimetypes", "status")
    for files in themes:
        for path, blob in files.items():
            kind, _, name = path.partition("/")
            if kind in kinds and name.endswith(".png"):
                yield Picture(
                    kind, "-".join(name.removesuffix(".png").split("-")[:2]), _opened(blob)
                )


def units(files: Files) -> Iterator[Picture]:
    """Read the first five peoples with at least 15 figures; all frames of a figure are one."""
    figures: dict[str, dict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
    for path, blob in files.items():
        people, _, name = path.partition("/")
        if name.endswith(".png"):
            figures[people][re.split(r"[/.+-]", name)[0]].append(blob)
    for people in sorted(p for p, found in figures.items() if len(found) >= 15)[:CLASSES]:
        for figure, frames in figures[people].items():
            for blob in frames:
                yield Picture(people, figure, _opened(blob))


def textures(files: Files) -> Iterator[Picture]:
    """Read the five largest sets of square textures, in four quarters."""
    with zipfile.ZipFile(io.BytesIO(files["pak4-textures.pk3"])) as packed:
        paths = [p for p in packed.namelist() if re.fullmatch(r"textures/\w+/.*\.(jpg|tga)", p)]
        images = {path: _opened(packed.read(path)) for path in sorted(paths)}
    square = {p: i for p, i in images.items() if i.width == i.height >= 2 * SIDE}
    for label in _most_frequent(path.split("/")[1] for path in square):
        for path, image in square.items():
            if path.split("/")[1] == label:
                name, half = path.split("/")[2], image.width // 2
                for x, y in ((0, 0), (half, 0), (0, half), (half, half)):
                    part = image.crop((x, y, x + half, y + half))
                    yield Picture(label, re.split(r"[\d_.]", name)[0], part)


def cells(files: Files) -> Iterator[Picture]:
    """Cut patches out of the micrographs of five kinds of cells, where the mask has cells."""
    kinds = sorted({path.split("/")[0] for path in files})[:CLASSES]
    for path in files:
        kind = path.split("/")[0]
        if kind not in kinds or not path.endswith("_img.png"):
            continue
        image = _opened(files[path]).getchannel("G")  # else the colours of the stains tell
        mask = np.asarray(Image.open(io.BytesIO(files[path.replace("_img", "_masks")]))) > 0
        for x in range(0, image.width - SIDE + 1, SIDE // 2):
            for y in range(0, image.height - SIDE + 1, SIDE // 2):
                if mask[y : y + SIDE, x : x + SIDE].mean() > 0.25:
                    patch = image.crop((x, y, x + SIDE, y + SIDE))
                    yield Picture(kind, path, patch.convert("RGB"))


def textiles(files: Files) -> Iterator[Picture]:
    """Read textiles: nominal, with a local defect, or different as a whole."""
    for path, blob in files.items():
        yield Picture(path.split("/")[0], path, _opened(blob))


def furniture(files: Files) -> Iterator[Picture]:
    """Read the icons of the largest rooms; numbered variants of a piece are one source."""
    pieces: list[Picture] = []
    for blob in files.values():
        with zipfile.ZipFile(io.BytesIO(blob)) as packed:
            catalog = packed.read("PluginFurnitureCatalog.properties").decode("latin-1")
            entries = dict(re.findall(r"^((?:category|icon)#\d+)=(.*?)\s*$", catalog, re.M))
            for key, path in entries.items():
                if key.startswith("icon#"):
                    room = entries["category#" + key.partition("#")[2]]
                    piece = re.split(r"[\d_.-]+", path.rpartition("/")[2])[0].lower()
                    pieces.append(Picture(room, piece, _opened(packed.read(path.lstrip("/")))))
    rooms = _most_frequent(p.label for p in pieces if p.label != "Miscellaneous")
    rooms.remove("Bathroom")  # the smallest, with too few pieces for a test
    yield from (p for p in pieces if p.label in rooms)


STRANGERS = {
    "letters": Stranger((FONTS,), letters, 60, 200, "five letters in display fonts", "font"),
    "scripts": Stranger((NOTO,), scripts, 60, 200, "letters of five scripts", "letter"),
    "emoji": Stranger((TWEMOJI,), emoji, 60, 50, "five groups of emoji", "name"),
    "icons": Stranger((OXYGEN, MATE), icons, 60, 50, "five kinds of desktop icons", "name"),
    "units": Stranger((WESNOTH,), units, 60, 200, "five kinds of figures of a game", "figure"),
    "textures": Stranger((ARENA,), textures, 60, 50, "five sets of textures of a game", "texture"),
    "cells": Stranger((CELLS,), cells, 60, 200, "five kinds of cells", "micrograph"),
    "textiles": Stranger((TEXTILES,), textiles, 100, 200, "three states of a textile", "image"),
    "furniture": Stranger((FURNITURE,), furniture, 60, 50, "furniture of four rooms", "piece"),
}


def _opened(blob: bytes) -> Image.Image:
    """Decode an image as RGB, on white where it is transparent."""
    image = Image.open(io.BytesIO(blob)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _drawn(font: bytes, character: str) -> Image.Image | None:
    """Draw a character in black on white, as large as fits; None where the font lacks it."""
    face = ImageFont.truetype(io.BytesIO(font), 96)
    drawn = []
    for text in (character, PRIVATE):
        image = Image.new("L", (320, 320), 255)
        ImageDraw.Draw(image).text((160, 160), text, 0, face, anchor="mm")
        drawn.append(image)
    box = ImageChops.invert(drawn[0]).getbbox()
    if box is None or ImageChops.difference(*drawn).getbbox() is None:
        return None
    image = ImageOps.pad(drawn[0].crop(box), (SIDE - 8, SIDE - 8), color=255)
    return ImageOps.expand(image, 4, 255).convert("RGB")


def _spaced(name: str) -> str:
    """Return a script's name as Unicode has it: LinearA → LINEAR A."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).upper()


def _most_frequent(labels: Iterator[str]) -> list[str]:
    """Return the five most frequent labels, sorted by name."""
    count = Counter(labels)
    return sorted(sorted(count, key=lambda label: (-count[label], label))[:CLASSES])
