"""The paper's own data from a folder: its seven datasets as image folders, and the Decathlon.

The datasets replace `domains.DOMAINS`; the Decathlon's archive replaces only those of Table 2.
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
SOURCE = "imagenet12"  # dataset that the Decathlon's network is pretrained on
SHARE = 7  # one in so many images of a class is for validation
FEW = 8  # train and validation images of a dataset that is only tested on


def names(folder: Path) -> tuple[str, ...]:
    """Return the datasets of `NAMES` that a folder has."""
    if not (found := folders(folder)):
        wanted = ", ".join(NAMES)
        raise CovNormError(
            f"{folder}: has none of the folders {wanted}. Put at least one there (the Decathlon's "
            "archive is only for table2)."
        )
    return tuple(found)


def load(name: str, folder: Path) -> Split:
    """Load all images of a dataset at 64 pixels.

    The folder has one folder of images per class, or train, val and test folders of that kind;
    `read_source` splits off missing parts.
    """
    found = folders(folder)
    if name not in found:
        raise CovNormError(f"{folder}: no dataset {name!r}: {choices(name, found)}")
    source = read_source(found[name])
    if lacking := [part for part in PARTS if part not in source.splits]:
        raise CovNormError(
            f"{found[name]}: has no {' and no '.join(lacking)} images. Add them, or use one folder "
            "per class, from which all parts are split."
        )
    decoded = decode(source, PIXELS, cache=cache() / "originals")
    notes = [*source.notes, *decoded.notes]
    notes += [f"{len(decoded.unreadable)} images could not be read"] if decoded.unreadable else []
    notes += [f"{len(decoded.duplicates)} images are in two parts"] if decoded.duplicates else []
    for note in notes:
        print(f"{name}: {note}", flush=True)
    tensors = {}
    for part in PARTS:
        tensors[f"x_{part}"] = decoded.splits[part].x
        tensors[f"y_{part}"] = decoded.splits[part].y
    return Split(**tensors, classes=decoded.classes)


def folders(folder: Path) -> dict[str, Path]:
    """Return {name: folder} in the paper's order, ignoring case."""
    inside = {f.name.casefold(): f for f in sorted(folder.iterdir())} if folder.is_dir() else {}
    return {n: inside[n.casefold()] for n in NAMES if n.casefold() in inside}


# ── the Decathlon's archive ──────────────────────────────────────────────────────────────────────


class Archive(Decathlon):
    """The datasets of the Decathlon that have images, normalised for ResNet-26."""

    def __init__(self, root: Path) -> None:
        preprocessing = preprocessing_of(torch.nn.Identity())  # the default
        names = Decathlon(root).datasets
        super().__init__(root, dict.fromkeys(names, preprocessing))  # else it reads all images
        self.names = tuple(n for n in names if self._has(n))

    def _has(self, name: str) -> bool:
        """Check for images: the devkit comes with annotations of all ten datasets."""
        files = self.annotations(name)
        if not all(f.exists() for f in files.values()):
            return False
        return all(Path(self.split(name, part).files[0]).exists() for part in files)

    def annotations(self, name: str) -> dict[str, Path]:
        """Return the files that list the train and val parts of a dataset."""
        return {p: self.root / "annotations" / f"{name}_{p}.json" for p in ("train", "val")}


def archive_in(folder: Path) -> Archive | None:
    """Return the Decathlon in a folder, or the folder itself if it is one; else None."""
    try:
        root = Decathlon(folder).root
    except CovNormError:
        return None
    return Archive(root)


def dataset(name: str, archive: Archive) -> Split:
    """Load a dataset of the Decathlon with centre crops, as its authors do for testing.

    The labels of its test part are not public, so ``test`` is its val part, and ``val`` is split
    from its train part: every seventh image of a class. `SOURCE` is only tested on, so its other
    parts have only a few images.
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
