"""Train, validation and test: as they are found, labelled, cut from each class, and decoded."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..errors import CovNormError

SPLITS = ("train", "val", "test")
TEST, VAL = 25, 15  # percent of a class


class Part(NamedTuple):
    """One split as it was found: names of the images, and of the class of each."""

    names: list[str]
    classes: list[str]
    pixels: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Items:
    """Images of one split before they are decoded: a name and a label each.

    A name is a path from the source's folder, or a row of an .npz such as ``x_train[7]``; then
    `pixels` holds the rows: uint8 (n, h, w, 1) or (n, h, w, 3).
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    pixels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    def take(self, where: Sequence[int]) -> Items:
        """Those at these places, in this order."""
        return Items(
            tuple(self.names[i] for i in where),
            tuple(self.labels[i] for i in where),
            None if self.pixels is None else self.pixels[list(where)],
        )


class Images(NamedTuple):
    """x: uint8 (n, 3, size, size), maybe larger than memory; y: int64 (n,); their n names."""

    x: Tensor
    y: Tensor
    files: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Decoded:
    """The images of a source as a network takes them.

    Attributes:
        splits: "train", and "val" and "test" where there are any.
        classes: names of the labels.
        size: side of the images in pixels.
        fit: how they were brought to it.
        unreadable: (file, reason) of those that are left out.
        duplicates: pairs of files in two splits whose pixels are equal.
        digest: SHA-256 of pixels, labels and classes.
        notes: what the user should know, in sentences.
    """

    splits: dict[str, Images]
    classes: tuple[str, ...]
    size: int
    fit: str
    unreadable: tuple[tuple[str, str], ...]
    duplicates: tuple[tuple[str, str], ...]
    digest: str
    notes: tuple[str, ...]

    def balance(self) -> dict[str, dict[str, int]]:
        """``{split: {class: images}}``."""
        n = len(self.classes)
        counts = {split: images.y.bincount(minlength=n) for split, images in self.splits.items()}
        return {s: dict(zip(self.classes, c.tolist(), strict=True)) for s, c in counts.items()}


def labelled(parts: Mapping[str, Part], classes: Sequence[str]) -> dict[str, Items]:
    """Names of classes become places in `classes`, which are those of train and at least two."""
    index = {name: i for i, name in enumerate(classes)}
    for split, part in parts.items():
        lost = sorted(set(part.classes) - index.keys())
        if lost:
            raise CovNormError(
                f"{split} has images of {few(lost)}, which train lacks: add such images to train, "
                f"or take these out of {split}"
            )
    if len(classes) == 1:
        raise CovNormError(
            f"has one class alone, {classes[0]!r}, so there is nothing to tell apart: add another"
        )
    return {
        split: Items(tuple(part.names), tuple(index[c] for c in part.classes), part.pixels)
        for split, part in parts.items()
        if part.names
    }


def complete(given: Mapping[str, Items], seed: int = 0) -> dict[str, Items]:
    """The splits of a source, from those that it has itself.

    - Given ones stay as they are. With train and val but no test, there is no test.
    - With train alone, 25 % of each class become test.
    - Without val, 15 % of what each class then has in train become val.

    Numbers are rounded, halves up, but the last training image of a class always stays. A split
    that no class can spare an image for is absent. See `cut` for which ones go.
    """
    splits = dict(given)
    if "test" not in splits and "val" not in splits:
        splits["train"], splits["test"] = cut(splits["train"], TEST, seed)
    if "val" not in splits:
        splits["train"], splits["val"] = cut(splits["train"], VAL, seed)
    return {split: splits[split] for split in SPLITS if split in splits and len(splits[split])}


def cut(items: Items, percent: int, seed: int) -> tuple[Items, Items]:
    """What stays, and `percent` of each class: those whose names hash lowest with the seed.

    So neither the order of the files nor other classes matter, and an image that is added later
    moves few others. Both parts keep the order of the items.
    """
    members = defaultdict(list)
    for i, number in enumerate(items.labels):
        members[number].append(i)
    gone: set[int] = set()
    for where in members.values():
        n = min((percent * len(where) + 50) // 100, len(where) - 1)
        gone.update(sorted(where, key=lambda i: _hash(items.names[i], seed))[:n])
    stay = [i for i in range(len(items)) if i not in gone]
    return items.take(stay), items.take(sorted(gone))


def duplicates(
    splits: Mapping[str, Iterable[tuple[Hashable, str]]],
) -> tuple[tuple[str, str], ...]:
    """Pairs (file, later file) of equal content in two splits, each given as (content, file).

    A file is paired with the first of its like in every split before its own.
    """
    pairs: list[tuple[str, str]] = []
    before: list[dict[Hashable, str]] = []
    for files in splits.values():
        here: dict[Hashable, str] = {}
        for content, file in files:
            pairs += [(other[content], file) for other in before if content in other]
            here.setdefault(content, file)
        before.append(here)
    return tuple(pairs)


def check_losses(
    splits: Mapping[str, Images],
    classes: Sequence[str],
    unreadable: Sequence[tuple[str, str]],
    limit: float,
) -> None:
    """At most this share is unreadable, and no split and no class of train has lost all."""
    bad = len(unreadable)
    total = bad + sum(len(images.y) for images in splits.values())
    first = "; ".join(f"{file}: {reason}" for file, reason in unreadable[:3])
    first += f"; and {bad - 3} more" if bad > 3 else ""
    if bad > limit * total:
        raise CovNormError(
            f"{bad} of {total} images cannot be read, more than {limit:.0%} (limit): restore or "
            f"remove them: {first}"
        )
    left = {f"split {split!r}": len(images.y) for split, images in splits.items()}
    counts = splits["train"].y.bincount(minlength=len(classes)).tolist()
    left |= {f"class {c!r} in train": n for c, n in zip(classes, counts, strict=True)}
    for what, n in left.items():
        if n == 0:
            raise CovNormError(f"{what} has no image that can be read: add one: {first}")


def few(names: Sequence[str]) -> str:
    """The first three of them, and how many more; for messages."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


def _hash(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode(errors="surrogatepass")).digest()
