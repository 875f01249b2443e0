"""COCO-style JSON files: annotations of images, and predictions."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CovNormError
from ..records import blame, write_file

File = str | os.PathLike[str]
Integers = Sequence[int] | Any  # or a tensor


@dataclass(frozen=True)
class Annotations:
    """The content of an annotation file.

    Attributes:
        images: file names by image id.
        categories_of: category ids by image id.
        names: category names by category id; empty if the file lists no categories.
    """

    file: Path
    images: dict[int, str]
    categories_of: dict[int, int]
    names: dict[int, str]


def read_annotations(file: File) -> Annotations:
    """Read images, annotations and categories of a COCO-style file; the last two are optional."""
    path = Path(file)
    data = read_json(path)
    images: dict[int, str] = {}
    categories_of: dict[int, int] = {}
    with blame(path):
        if not isinstance(data, dict) or "images" not in data:
            raise CovNormError("not an annotation file: it must be an object with 'images'")
        for entry in _entries(data["images"], "images"):
            key, name = _integer(entry, "id"), entry.get("file_name")
            if not isinstance(name, str):
                raise CovNormError(f"image {key} has no file_name. Add it.")
            if key in images:
                raise CovNormError(f"image id {key} occurs twice. Keep one.")
            images[key] = name
        for entry in _entries(data.get("annotations", []), "annotations"):
            key = _integer(entry, "image_id")
            if key not in images:
                raise CovNormError(f"an annotation is for image {key}, which is not listed")
            if key in categories_of:
                raise CovNormError(f"image {key} has two annotations. Keep one.")
            categories_of[key] = _integer(entry, "category_id")
        categories = _entries(data.get("categories", []), "categories")
        names = {_integer(c, "id"): str(c.get("name", c["id"])) for c in categories}
        if len(names) < len(categories):
            raise CovNormError("a category id occurs twice. Keep one.")
    return Annotations(path, images, categories_of, names)


def read_predictions(file: File) -> list[tuple[int, int]]:
    """Read a list of ``{"image_id", "category_id"}`` as pairs."""
    path = Path(file)
    data = read_json(path)
    with blame(path):
        entries = _entries(data, "predictions")
        return [(_integer(e, "image_id"), _integer(e, "category_id")) for e in entries]


def write_predictions(
    file: File, image_ids: Integers, labels: Integers, categories: Sequence[int] | None = None
) -> Path:
    """Write ``[{"image_id", "category_id"}, …]`` from lists or tensors (n,) of integers.

    Labels are indices into `categories` (`Split.categories`). Without it they are category ids.
    """
    path, ids, values = Path(file), _integers(image_ids), _integers(labels)
    if len(ids) != len(values):
        raise CovNormError(f"{path}: {len(ids)} image ids but {len(values)} labels")
    if len(set(ids)) < len(ids):
        raise CovNormError(f"{path}: not written, because an image id occurs twice")
    if categories is not None:
        for v in values:
            if not 0 <= v < len(categories):
                raise CovNormError(f"{path}: label {v}, but there are {len(categories)} classes")
        values = [categories[v] for v in values]
    write_json(path, [{"image_id": i, "category_id": c} for i, c in zip(ids, values, strict=True)])
    return path


def read_json(file: Path) -> Any:
    """Read a JSON file; errors name the file."""
    with blame(file):
        return json.loads(file.read_bytes())


def write_json(file: Path, data: object) -> None:
    """Write a JSON file, completely or not at all."""
    with blame(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(data, allow_nan=False).encode())


def _entries(data: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(data, list):
        raise CovNormError(f"{name} must be a list, not {type(data).__name__}")
    for entry in data:
        if not isinstance(entry, dict):
            raise CovNormError(f"{name} must be objects, not {entry!r}")
    return data


def _integer(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        shown = {k: entry[k] for k in list(entry)[:4]}
        raise CovNormError(f"{key!r} must be an integer in {shown}")
    return value


def _integers(values: Any) -> list[int]:
    try:
        return [operator.index(v) for v in getattr(values, "tolist", lambda: values)()]
    except TypeError as error:
        raise CovNormError(f"image ids and labels must be integers ({error})") from error
