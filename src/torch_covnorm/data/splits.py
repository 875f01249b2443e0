"""The splits of a source: train, validation and test images before they are decoded."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import CovNormError

SPLITS = ("train", "val", "test")
SYNONYMS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
TEST_PERCENT, VAL_PERCENT = 25, 15  # of each class


class Part(NamedTuple):
    """One split as read: the names of the images and the class name of each."""

    names: list[str]
    classes: list[str]
    pixels: np.ndarray | None = None


class Contents(NamedTuple):
    """What a reader found: the parts by split, and the class names in order.

    There may be more classes than train has images of.
    """

    parts: dict[str, Part]
    classes: Sequence[str]
    notes: list[str]


@dataclass(frozen=True, eq=False)
class Items:
    """The images of one split before they are decoded: one name and one label each.

    A name is a path relative to the source's folder, or a row of an .npz such as ``x_train[7]``. In
    that case `pixels` holds the rows: uint8 (n, h, w, 1) or (n, h, w, 3).
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    pixels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    def take(self, indices: Sequence[int]) -> Items:
        """Return the items at these indices, in this order."""
        return Items(
            tuple(self.names[i] for i in indices),
            tuple(self.labels[i] for i in indices),
            None if self.pixels is None else self.pixels[list(indices)],
        )


def labelled(parts: Mapping[str, Part], classes: Sequence[str]) -> dict[str, Items]:
    """Replace class names by their index in `classes`, the classes of train: at least two."""
    index = {name: i for i, name in enumerate(classes)}
    for split, part in parts.items():
        missing = sorted(set(part.classes) - index.keys())
        if missing:
            raise CovNormError(
                f"{split} has images of {first_few(missing)}, which train lacks. Add such images "
                f"to train, or remove them from {split}."
            )
    if len(classes) == 1:
        raise CovNormError(f"there is only one class, {classes[0]!r}. Add images of another.")
    return {
        split: Items(tuple(part.names), tuple(index[c] for c in part.classes), part.pixels)
        for split, part in parts.items()
        if part.names
    }


def complete(given: Mapping[str, Items], seed: int = 0) -> dict[str, Items]:
    """Return all splits, and take those that are missing from train.

    - Given splits stay as they are. With train and val but no test, there is no test split.
    - With only train, 25 % of each class become test.
    - Without val, 15 % of what is then left of each class in train become val.

    Counts are rounded, halves up, but the last training image of a class always stays. A split
    without any image is absent. See `cut` for which images are taken.
    """
    splits = dict(given)
    if "test" not in splits and "val" not in splits:
        splits["train"], splits["test"] = cut(splits["train"], TEST_PERCENT, seed)
    if "val" not in splits:
        splits["train"], splits["val"] = cut(splits["train"], VAL_PERCENT, seed)
    return {split: splits[split] for split in SPLITS if split in splits and len(splits[split])}


def cut(items: Items, percent: int, seed: int) -> tuple[Items, Items]:
    """Return the items that stay and `percent` of each class: the lowest hashes of seed and name.

    The result does not depend on the order of the files or on other classes, and adding an image
    later moves few others. Both parts keep the order of the items.
    """

    def rank(i: int) -> bytes:
        return hashlib.sha256(f"{seed} {items.names[i]}".encode(errors="surrogatepass")).digest()

    members = defaultdict(list)
    for i, label in enumerate(items.labels):
        members[label].append(i)
    taken: set[int] = set()
    for indices in members.values():
        n = min((percent * len(indices) + 50) // 100, len(indices) - 1)
        taken.update(sorted(indices, key=rank)[:n])
    return items.take([i for i in range(len(items)) if i not in taken]), items.take(sorted(taken))


def first_few(
    values: Sequence[object], separator: str = ", ", show: Callable[[object], str] = repr
) -> str:
    """Return the first three values and how many more there are, for messages."""
    more = f" and {len(values) - 3} more" if len(values) > 3 else ""
    return separator.join(show(value) for value in values[:3]) + more
