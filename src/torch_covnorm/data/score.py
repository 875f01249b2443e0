"""The Visual Decathlon's score, and the COCO-style files that it is computed from.

``S = sum_d 1000 (max(0, Emax_d - E_d) / Emax_d)^2`` with ``Emax_d`` twice the baseline's error:
the baseline itself gets 250 points a domain, a perfect classifier 1000.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ..errors import CovNormError, choices
from ..records import blame, write_file

# Test accuracy in percent of a network fine-tuned for each domain (Rebuffi et al. 2017).
BASELINES = {
    "imagenet12": 59.87,
    "aircraft": 60.34,
    "cifar100": 82.12,
    "daimlerpedcls": 92.82,
    "dtd": 55.53,
    "gtsrb": 97.53,
    "vgg-flowers": 81.41,
    "omniglot": 87.69,
    "svhn": 96.55,
    "ucf101": 51.20,
}

File = str | os.PathLike[str]


def decathlon_score(
    accuracies: Mapping[str, float], *, baselines: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """``{"total": S, "points": {domain: points}}`` from test accuracies in percent.

    With some of the ten domains, the total is over those alone and no Decathlon score to compare
    with others. `baselines` (accuracies in percent) takes the formula to other domains.
    """
    known = BASELINES if baselines is None else baselines
    if not isinstance(accuracies, Mapping) or not accuracies:
        raise CovNormError("no accuracies: give {domain: accuracy in percent}")
    points = {}
    for domain, accuracy in accuracies.items():
        if domain not in known:
            raise CovNormError(f"no baseline for domain {domain!r}: {choices(domain, known)}")
        error = 100 - _percent(accuracy, f"accuracy of {domain!r}")
        worst = 2 * (100 - _percent(known[domain], f"baseline of {domain!r}"))
        if worst == 0:
            raise CovNormError(f"baseline of {domain!r} is 100: its error must be above 0")
        points[domain] = 1000 * (max(0.0, worst - error) / worst) ** 2
    return {"total": math.fsum(points.values()), "points": points}


def score_predictions(predictions_file: File, labels_file: File) -> float:
    """Accuracy in percent of a list of ``{"image_id", "category_id"}`` against annotations.

    Every image of the labels must have one prediction, and there may be no others.
    """
    labels = read_annotations(labels_file)
    if not labels.images:
        raise CovNormError(f"{labels.file}: has no images to score")
    if len(labels.categories_of) < len(labels.images):
        missing = next(i for i in labels.images if i not in labels.categories_of)
        raise CovNormError(
            f"{labels.file}: image {missing} has no annotation; a stripped file cannot be scored "
            "against, take the one with labels"
        )
    file, predicted = Path(predictions_file), {}
    for entry in _entries(file, read_json(file), "a prediction"):
        image, category = (_integer(file, entry, k) for k in ("image_id", "category_id"))
        if image not in labels.images:
            raise CovNormError(f"{file}: image_id {image} is not in {labels.file}")
        if image in predicted:
            raise CovNormError(f"{file}: image_id {image} is predicted twice: keep one")
        if labels.names and category not in labels.names:
            raise CovNormError(
                f"{file}: category_id {category} is not in {labels.file}: write category ids, "
                "not labels (write_predictions does it with categories=)"
            )
        predicted[image] = category
    lost = [i for i in labels.images if i not in predicted]
    if lost:
        raise CovNormError(
            f"{file}: {len(lost)} of the {len(labels.images)} images of {labels.file} have no "
            f"prediction, image_id {lost[0]} is the first"
        )
    right = sum(predicted[i] == labels.categories_of[i] for i in predicted)
    return 100 * right / len(predicted)


def score_results(
    predictions: Mapping[str, tuple[File, File]] | File,
    labels: File | None = None,
    *,
    part: str = "test",
    baselines: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """`decathlon_score` from files, with the accuracies beside it as ``"accuracies"``.

    Either ``{dataset: (predictions file, labels file)}``, or two folders: predictions
    ``<dataset>.json`` and labels ``<dataset>_<part>.json``. Every predictions file counts.
    """
    if isinstance(predictions, Mapping):
        pairs = dict(predictions)
    elif labels is None:
        raise CovNormError(f"{os.fspath(predictions)}: give the folder of labels too")
    else:
        files = sorted(Path(predictions).glob("*.json"))
        pairs = {f.stem: (f, Path(labels) / f"{f.stem}_{part}.json") for f in files}
        if not pairs:
            raise CovNormError(f"{os.fspath(predictions)}: has no <dataset>.json with predictions")
    known = BASELINES if baselines is None else baselines
    for name in pairs:  # before any large file is read
        if name not in known:
            raise CovNormError(
                f"{os.fspath(pairs[name][0])}: no baseline for {name!r}: {choices(name, known)}"
            )
    accuracies = {name: score_predictions(*pair) for name, pair in pairs.items()}
    return {**decathlon_score(accuracies, baselines=known), "accuracies": accuracies}


def write_predictions(
    file: File,
    image_ids: Sequence[int] | Any,
    labels: Sequence[int] | Any,
    categories: Sequence[int] | None = None,
) -> Path:
    """Write ``[{"image_id", "category_id"}, …]``; lists or tensors (n,) of whole numbers.

    Labels are indices into `categories` (`Split.categories`); without it they are category ids.
    """
    path, ids, values = Path(file), _integers(image_ids), _integers(labels)
    if len(ids) != len(values):
        raise CovNormError(f"{path}: {len(ids)} image ids but {len(values)} labels")
    if len(set(ids)) < len(ids):
        raise CovNormError(f"{path}: an image id is given twice; not written")
    if categories is not None:
        wrong = [v for v in values if not 0 <= v < len(categories)]
        if wrong:
            raise CovNormError(f"{path}: label {wrong[0]} of {len(categories)} categories")
        values = [categories[v] for v in values]
    write_json(path, [{"image_id": i, "category_id": c} for i, c in zip(ids, values, strict=True)])
    return path


@dataclass(frozen=True)
class Annotations:
    """A COCO-style file: file names by image id, category ids by image id, names by category id.

    The names are empty where the file lists no categories.
    """

    file: Path
    images: dict[int, str]
    categories_of: dict[int, int]
    names: dict[int, str]


def read_annotations(file: File) -> Annotations:
    """Images, annotations and categories of a COCO-style file; the last two may be absent."""
    path = Path(file)
    data = read_json(path)
    if not isinstance(data, dict) or "images" not in data:
        raise CovNormError(f"{path}: is no annotation file: it needs an object with 'images'")
    images: dict[int, str] = {}
    for entry in _entries(path, data["images"], "an image"):
        key, name = _integer(path, entry, "id"), entry.get("file_name")
        if not isinstance(name, str):
            raise CovNormError(f"{path}: image {key} has no file_name")
        if key in images:
            raise CovNormError(f"{path}: image id {key} is there twice")
        images[key] = name
    categories_of: dict[int, int] = {}
    for entry in _entries(path, data.get("annotations", []), "an annotation"):
        key = _integer(path, entry, "image_id")
        if key not in images:
            raise CovNormError(f"{path}: an annotation is of image {key}, which is not listed")
        if key in categories_of:
            raise CovNormError(f"{path}: image {key} has two annotations: keep one")
        categories_of[key] = _integer(path, entry, "category_id")
    categories = _entries(path, data.get("categories", []), "a category")
    names = {_integer(path, c, "id"): str(c.get("name", c["id"])) for c in categories}
    if len(names) < len(categories):
        raise CovNormError(f"{path}: a category id is there twice")
    return Annotations(path, images, categories_of, names)


def read_json(file: Path) -> Any:
    """What a JSON file holds; an error names the file."""
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise CovNormError(f"{file}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CovNormError(f"{file}: is no JSON ({error}): restore it from a copy") from error


def write_json(file: Path, data: object) -> None:
    """All of the file or nothing."""
    with blame(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(data, allow_nan=False).encode())


def _entries(file: Path, data: Any, word: str) -> list[dict[str, Any]]:
    if not isinstance(data, list):
        raise CovNormError(f"{file}: need a list where {word} stands, not {type(data).__name__}")
    for entry in data:
        if not isinstance(entry, dict):
            raise CovNormError(f"{file}: {word} is {entry!r}, not an object")
    return data


def _integer(file: Path, entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        shown = {k: entry[k] for k in list(entry)[:4]}
        raise CovNormError(f"{file}: {key!r} must be a whole number in {shown}")
    return value


def _integers(values: Any) -> list[int]:
    try:
        return [operator.index(v) for v in getattr(values, "tolist", lambda: values)()]
    except TypeError as error:
        raise CovNormError(f"image ids and labels must be whole numbers ({error})") from error


def _percent(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CovNormError(f"{what} is {value!r}: give a number in percent")
    if not 0 <= float(value) <= 100:  # NaN neither
        raise CovNormError(f"{what} is {value!r}: percent lie between 0 and 100")
    return float(value)
