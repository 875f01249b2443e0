"""The paper's own data from a folder: its seven datasets as image folders, and the Decathlon.

They take the place of `domains.DOMAINS`; the Decathlon's archive that of Table 2's alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from torch_covnorm.backbones import preprocessing_of
from torch_covnorm.data import Decathlon, decode, read_image, read_source
from torch_covnorm.errors import CovNormError, choices

from .domains import PARTS, Split, kept
from .fetch import cache, sha256

NAMES = ("FGVC", "MITIndoor", "Flowers", "Caltech256", "SVHN", "SUN397", "CIFAR100")
PIXELS = 64  # side of the images in folders
VERSION = 1  # of the kept files
SOURCE = "imagenet12"  # what the Decathlon's network is trained on
SHARE = 7  # of so many images of a class one is for validation
FEW = 8  # images of what is only tested on


def names(folder: Path) -> tuple[str, ...]:
    """Those of `NAMES` that a folder has."""
    if not (found := folders(folder)):
        wanted = ", ".join(NAMES)
        raise CovNormError(
            f"{folder}: has none of the folders {wanted}: put one there at least (the Decathlon's "
            "archive is for table2 alone)"
        )
    return tuple(found)


def load(name: str, folder: Path) -> Split:
    """All images of the dataset of that name, at 64 pixels.

    A folder of images a class, or train, val and test of such, as `read_source` takes them and
    cuts what is missing.
    """
    found = folders(folder)
    if name not in found:
        raise CovNormError(f"{folder}: no dataset {name!r}: {choices(name, found)}")
    source = read_source(found[name])
    if lacking := [part for part in PARTS if part not in source.splits]:
        raise CovNormError(
            f"{found[name]}: has no {' and no '.join(lacking)} images: add them, or give one "
            "folder a class and let them be cut"
        )
    decoded = decode(source, PIXELS, cache=cache() / "originals")
    notes = [*source.notes, *decoded.notes]
    notes += [f"{len(decoded.unreadable)} images cannot be read"] if decoded.unreadable else []
    notes += [f"{len(decoded.duplicates)} images are in two parts"] if decoded.duplicates else []
    for note in notes:
        print(f"{name}: {note}", flush=True)
    tensors = {}
    for part in PARTS:
        tensors[f"x_{part}"] = decoded.splits[part].x
        tensors[f"y_{part}"] = decoded.splits[part].y
    return Split(**tensors, classes=decoded.classes)


def folders(folder: Path) -> dict[str, Path]:
    """{name: its folder}, in the paper's order; upper and lower case are the same."""
    inside = {f.name.casefold(): f for f in sorted(folder.iterdir())} if folder.is_dir() else {}
    return {n: inside[n.casefold()] for n in NAMES if n.casefold() in inside}


# ── the Decathlon's archive ──────────────────────────────────────────────────────────────────────


class Archive(Decathlon):
    """The Decathlon with what of it is there: images normalised as ResNet-26 takes them."""

    def __init__(self, root: Path) -> None:
        how = preprocessing_of(torch.nn.Identity())  # as of all that say nothing
        names = Decathlon(root).datasets
        super().__init__(root, dict.fromkeys(names, how))  # or all images were read for it first
        self.names = tuple(n for n in names if self._has(n))

    def _has(self, name: str) -> bool:
        """Annotations of all ten come with the devkit, their images do not."""
        files = self.annotations(name)
        if not all(f.exists() for f in files.values()):
            return False
        return all(Path(self.split(name, part).files[0]).exists() for part in files)

    def annotations(self, name: str) -> dict[str, Path]:
        """The files that list the train and val part of a dataset."""
        return {p: self.root / "annotations" / f"{name}_{p}.json" for p in ("train", "val")}


def archive_in(folder: Path) -> Archive | None:
    """The Decathlon in a folder, or that the folder is; None where there is none."""
    try:
        root = Decathlon(folder).root
    except CovNormError:
        return None
    return Archive(root)


def dataset(name: str, archive: Archive) -> Split:
    """A dataset of the Decathlon, cropped to the middle, as the authors do for a test.

    The labels of its test part are not public, so ``test`` is its val part, and ``val`` is cut from
    its train part: every seventh image of a class. Of `SOURCE`, which is only tested on here, a few
    images stand for the others.
    """
    splits = {part: archive.split(name, part, augment=False) for part in ("train", "val")}
    made_of = [VERSION, SHARE, FEW, *(sha256(f) for f in archive.annotations(name).values())]
    about = {"dataset": json.dumps({"made_of": made_of, "classes": splits["train"].classes})}

    def build() -> dict[str, torch.Tensor]:
        print(f"decoding {name}", flush=True)
        labels = {part: torch.tensor(split.labels) for part, split in splits.items()}
        seen: dict[int, int] = {}
        train: list[int] = []
        val: list[int] = []
        for i, label in enumerate(labels["train"].tolist()):
            seen[label] = seen.get(label, 0) + 1
            (val if seen[label] % SHARE == 0 else train).append(i)
        if name == SOURCE:
            train, val = train[:FEW], val[:FEW]
        places = {"train": ("train", train), "val": ("train", val)}
        places["test"] = ("val", list(range(len(labels["val"]))))
        tensors = {}
        for part, (of, chosen) in places.items():
            split = splits[of]
            images = [split.rule(read_image(split.files[i]), False) for i in chosen]
            tensors[f"x_{part}"] = torch.stack(images).contiguous()
            tensors[f"y_{part}"] = labels[of][chosen]
        return tensors

    file = cache() / "decathlon" / f"{name}.safetensors"
    return Split(**kept(file, about, build), classes=tuple(splits["train"].classes))
