"""What counts as a source of labelled images: endings, names of splits, the words that say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .splits import Part

SMALLEST = 8  # pixels on a side
ENDINGS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .tif .tiff .pgm .ppm .pbm .pnm .gif".split()  # noqa: SIM905
)
SYNONYMS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
CONVENTION = (
    "give a folder with one folder of images a class (or train/, val/ and test/ of such), a .csv "
    "with path,label[,split] or an .npz with x_train and y_train"
)


class Found(NamedTuple):
    """What a reader found: names and classes by split."""

    parts: dict[str, Part]
    classes: Sequence[str]  # in their order; maybe more than train has
    notes: list[str]


def ending_of(name: str) -> str:
    """``.jpg`` of a file's name."""
    return Path(name).suffix.lower()
