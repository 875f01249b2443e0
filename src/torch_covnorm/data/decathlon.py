"""The Visual Decathlon (Rebuffi et al. 2017): ten datasets in one archive of small images.

The unpacked archive::

    decathlon-1.0/annotations/<dataset>_{train,val,test_stripped}.json    COCO-style
    decathlon-1.0/data/<dataset>/<part>/…/000001.jpg                      shorter side 72

Image names are relative to the archive's root. Other datasets in this layout work too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import CovNormError, choices
from ..records import blame
from .annotations import Annotations, File, read_annotations, read_json, write_json
from .image_files import read_image
from .images import Rule, Statistics, channel_statistics, check_statistics, normalise, resize

FOLDER = "decathlon-1.0"
FILES = {"train": "train", "val": "val", "test": "test_stripped"}
# Number of classes; of train, val and test images.
PUBLISHED = {
    "aircraft": (100, 3334, 3333, 3333),
    "cifar100": (100, 40000, 10000, 10000),
    "daimlerpedcls": (2, 23520, 5880, 19600),
    "dtd": (47, 1880, 1880, 1880),
    "gtsrb": (43, 31367, 7842, 12630),
    "omniglot": (1623, 17853, 6492, 8115),
    "svhn": (10, 47217, 26040, 26032),
    "ucf101": (101, 7585, 1952, 3783),
    "vgg-flowers": (102, 1020, 1020, 6149),
    "imagenet12": (1000, 1232167, 49000, 48238),
}
# A mirrored digit, letter or sign means something else, and its edges matter.
WHOLE = Rule(crop=72, random_crop=False, flip=False)
RULES = {"gtsrb": WHOLE, "omniglot": WHOLE, "svhn": WHOLE}


@dataclass(eq=False, repr=False)
class Split(Dataset[tuple[Tensor, int]]):
    """One part of one dataset: (image float32 (3, crop, crop), label), in the order of the file.

    For test the second item is the image id, for `write_predictions`. A label is an index into
    `categories` (category ids) and `classes` (their names). Mean and std are those of the training
    images per channel, on a scale of 0 to 1.
    """

    files: list[str]
    image_ids: list[int]
    labels: list[int] | None
    categories: list[int]
    classes: list[str]
    mean: list[float]
    std: list[float]
    rule: Rule
    augment: bool

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.rule(read_image(self.files[index]), self.augment)
        target = (self.image_ids if self.labels is None else self.labels)[index]
        return normalise(image, self.mean, self.std), target

    def loader(self, batch_size: int = 128, **options: Any) -> DataLoader[tuple[Tensor, int]]:
        """Return a DataLoader with these `options`. It shuffles if the part is augmented."""
        shuffle = self.augment and "sampler" not in options
        return DataLoader(self, **{"batch_size": batch_size, "shuffle": shuffle, **options})


class Decathlon:
    """The archive on disk.

    Args:
        root: the folder that contains ``annotations/``, its parent, or its ``data/``.
        statistics: mean and std of the datasets, ``{dataset: {"mean": [r, g, b], "std": […]}}``
            on a scale of 0 to 1, or a JSON file with that content. Missing ones are computed from
            all pixels of the training images when first needed, and added to the file.
    """

    def __init__(self, root: File, statistics: Mapping[str, Any] | File | None = None) -> None:
        self.root = _find(Path(root))
        self._names: dict[str, dict[int, str]] = {}
        self._statistics: dict[str, Statistics] = {}
        self._cache: Path | None = None
        if not isinstance(statistics, Mapping | None):
            self._cache = Path(statistics)
            statistics = _read_statistics(self._cache)
        where = self._cache or "statistics="
        for name, entry in (statistics or {}).items():
            if name not in {*PUBLISHED, *self.datasets}:
                raise CovNormError(f"{where}: no dataset {name!r}: {choices(name, self.datasets)}")
            self._statistics[name] = check_statistics(entry, f"{where}: {name!r}")

    @property
    def datasets(self) -> list[str]:
        """Datasets with an annotation file: the ten in the order of `PUBLISHED`, then others."""
        existing = {
            file.name.removesuffix(f"_{ending}.json")
            for ending in FILES.values()
            for file in (self.root / "annotations").glob(f"*_{ending}.json")
        }
        return [n for n in PUBLISHED if n in existing] + sorted(existing - set(PUBLISHED))

    def classes(self, name: str) -> list[str]:
        """Return the class names in the order of the labels: sorted by category id."""
        return list(self._categories(name).values())

    def split(
        self, name: str, part: str, *, augment: bool | None = None, rule: Rule | None = None
    ) -> Split:
        """Return a part of a dataset as a torch Dataset.

        Images are resized to 72, then cropped to 64: randomly and with flips for training, else at
        the center. For gtsrb, omniglot and svhn it is the central 72, never flipped.

        Args:
            name: one of `datasets`.
            part: "train", "val" or "test".
            augment: whether crops and flips are random; by default only for "train".
            rule: sizes and crops other than the authors' for this dataset.
        """
        annotations = self._annotations(name, part)
        names = self._categories(name, annotations if part == "train" else None)
        return Split(
            _files(annotations, self.root),
            list(annotations.images),
            None if part == "test" else _labels(annotations, list(names)),
            list(names),
            list(names.values()),
            *self.statistics(name),
            rule or RULES.get(name, Rule()),
            part == "train" if augment is None else augment,
        )

    def statistics(self, name: str) -> Statistics:
        """Return mean and std per channel: as given, or computed from the training images."""
        if name not in self._statistics:
            files = _files(self._annotations(name, "train"), self.root)
            pixels = (resize(read_image(f), Rule.resize) for f in files)
            mean, std = channel_statistics(pixels)
            entry = {"mean": mean, "std": std}
            self._statistics[name] = check_statistics(entry, f"training images of {name!r}")
            if self._cache:
                write_json(self._cache, {**_read_statistics(self._cache), name: entry})
        return self._statistics[name]

    def differences(self) -> list[str]:
        """List where this archive differs from the published one in datasets, classes or sizes."""
        result = [f"{n}: not one of the ten datasets" for n in self.datasets if n not in PUBLISHED]
        for name, (classes, *sizes) in PUBLISHED.items():
            for part, size in zip(FILES, sizes, strict=True):
                if not self._file(name, part).exists():
                    result.append(f"{name}: no {self._file(name, part).name}")
                    continue
                annotations = self._annotations(name, part)
                n = len(annotations.images)
                if n != size:
                    result.append(f"{name}: {n} {part} images, published {size}")
                n = len(self._categories(name, annotations)) if part == "train" else classes
                if n != classes:
                    result.append(f"{name}: {n} classes, published {classes}")
        return result

    def _file(self, name: str, part: str) -> Path:
        return self.root / "annotations" / f"{name}_{FILES[part]}.json"

    def _annotations(self, name: str, part: str) -> Annotations:
        if part not in FILES:
            raise CovNormError(f"part {part!r}: {choices(part, FILES)}")
        known, file = self.datasets, self._file(name, part)
        if name not in known and name not in PUBLISHED:
            raise CovNormError(f"{self.root} has no dataset {name!r}: {choices(name, known)}")
        if not file.exists():
            raise CovNormError(f"{file}: is missing. Unpack the devkit into {self.root}.")
        annotations = read_annotations(file)
        if not annotations.images:
            raise CovNormError(f"{file}: lists no images. Restore it from the devkit.")
        return annotations

    def _categories(self, name: str, train: Annotations | None = None) -> dict[int, str]:
        """Return names by category id, sorted: those that train lists, else those it uses."""
        if name not in self._names:
            train = train or self._annotations(name, "train")
            names = train.names or {c: str(c) for c in train.categories_of.values()}
            self._names[name] = dict(sorted(names.items()))
        return self._names[name]


def _find(root: Path) -> Path:
    """Find the folder that contains ``annotations/``, given it, its parent or its ``data/``."""
    inside = [folder.parent for folder in root.glob("*/annotations")]
    places = [root, root / FOLDER, *(inside if len(inside) == 1 else [])]
    places += [root.resolve().parent] if root.name == "data" else []
    for place in places:
        if (place / "annotations").is_dir():
            return place
    raise CovNormError(f"{root}: no annotations folder. Use {FOLDER} of the unpacked archive.")


def _files(annotations: Annotations, root: Path) -> list[str]:
    """Return the path of every image.

    Names must stay below the root, because the file is not trusted. Links inside the archive are
    followed, because large parts are often on another disk.
    """
    names, file = [], annotations.file
    for name in annotations.images.values():
        path = PurePosixPath(name)
        if not path.name or path.is_absolute() or ".." in path.parts or set(name) & set("\\:\0"):
            raise CovNormError(f"{file}: file_name {name!r} is not inside {root}. Correct it.")
        names.append(str(path))
    short = [n.removeprefix("data/") for n in names]
    if not (root / names[0]).exists() and (root / short[0]).exists():
        names = short  # unpacked beside annotations/ instead of into data/
    return [os.path.join(root, n) for n in names]  # noqa: PTH118 - a million Paths are slow


def _labels(annotations: Annotations, categories: list[int]) -> list[int]:
    index, labels = {c: i for i, c in enumerate(categories)}, []
    with blame(annotations.file):
        for image in annotations.images:
            category = annotations.categories_of.get(image)
            if category is None:
                raise CovNormError(f"image {image} has no annotation. Add one.")
            if category not in index:
                where = f"category {category} of image {image}"
                raise CovNormError(f"{where} is not in the training part. List it there.")
            labels.append(index[category])
    return labels


def _read_statistics(file: Path) -> dict[str, Any]:
    entries = read_json(file) if file.exists() else {}
    if not isinstance(entries, dict):
        raise CovNormError(f"{file}: must be an object {{dataset: {{mean, std}}}}")
    return entries
