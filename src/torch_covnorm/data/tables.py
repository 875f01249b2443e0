"""Read tables of labeled images: a .csv of paths, or an .npz of arrays."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CovNormError, choices
from .image_files import MIN_SIDE, has_image_ending
from .splits import SPLITS, SYNONYMS, Contents, Part, first_few

COLUMNS = {
    "path": ("path", "file", "filename", "image"),
    "label": ("label", "class", "target"),
    "split": ("split",),
}
INDICATORS = frozenset(("0", "1", "0.0", "1.0", "true", "false"))
ONE_LABEL = "Give every image one label: multi-label tasks are not supported yet."


def read_csv(path: Path) -> Contents:
    """Read rows of path, label and optionally split."""
    lines = _lines(path)
    if not lines:
        return Contents({}, [], ["the file is empty"])
    columns, width, header = _columns(lines)
    rows: dict[tuple[str, str], tuple[str, int]] = {}  # (split, path): label, line
    first: dict[str, tuple[str, int]] = {}  # path: label, line
    bad, repeated, conflicts = [], 0, []
    for line, cells in lines[header:]:
        row = {column: cells[i] if i < len(cells) else "" for column, i in columns.items()}
        missing = [column for column, cell in row.items() if not cell]
        label = unicodedata.normalize("NFC", row["label"])
        split = SYNONYMS.get(row.get("split", "train").casefold(), "")
        before, line_before = first.get(row["path"], (label, line))
        if missing:
            bad.append(f"line {line} has no {missing[0]}")
        elif len(cells) > width:
            bad.append(f"line {line} has {len(cells)} columns instead of {width}")
        elif not split:
            bad.append(f"line {line} has split {row['split']!r}, {choices(row['split'], SPLITS)}")
        elif before != label:
            conflicts.append(
                f"line {line} has label {label!r} for the image of line {line_before}, {before!r}"
            )
        elif (split, row["path"]) in rows:
            repeated += 1
        else:
            rows[split, row["path"]] = first[row["path"]] = label, line
    if bad:
        raise CovNormError(f"{first_few(bad, '; ', str)}. Correct or remove these lines.")
    if conflicts:
        raise CovNormError(f"{first_few(conflicts, '; ', str)}. {ONE_LABEL}")
    notes = _check_combined(list(rows.values()), lines[0][1] if header else [], columns["label"])
    parts = {s: Part([], []) for s in SPLITS}
    for (split, name), (label, _) in rows.items():
        parts[split].names.append(name)
        parts[split].classes.append(label)
    notes += [f"ignored: lines that repeat another ({repeated})"] if repeated else []
    return Contents(parts, sorted(set(parts["train"].classes)), notes)


def _check_combined(
    labels: Sequence[tuple[str, int]], header: Sequence[str], column: int
) -> list[str]:
    """Refuse labels (label, line) such as "cat|dog" that combine others; return notes.

    Labels combine if a part of one is also another label or a part of it. If no part occurs
    elsewhere, the separator belongs to the name of the class.
    """
    lines = dict(reversed(labels))  # the first line of each
    parts = {label: {p.strip() for p in re.split("[|;]", label)} - {""} for label in lines}
    uses = Counter(part for each in parts.values() for part in each)
    combined = sorted((lines[k], k) for k, each in parts.items() if len(each) > 1)
    for line, label in combined:
        if any(uses[part] > 1 for part in parts[label]):
            name = header[column] if header else str(column + 1)
            raise CovNormError(
                f"line {line}, column {name!r}: {label!r} names several labels. {ONE_LABEL} If it "
                "is one class, rename it without | and ;."
            )
    if not combined:
        return []
    line, label = combined[0]
    return [f"labels with | or ; are read as one class each, for example {label!r} (line {line})"]


def _check_indicators(lines: list[tuple[int, list[str]]]) -> None:
    """Refuse several columns of 0 and 1: one column per label."""
    first = lines[0][1]
    header = not any(cell in INDICATORS for cell in first)
    rows = [cells for _, cells in lines[header:]]
    columns = [
        i
        for i in range(len(first))
        if rows and all(i < len(cells) and cells[i].casefold() in INDICATORS for cells in rows)
    ]
    if len(columns) > 1:
        names = first_few([first[i] if header else i + 1 for i in columns])
        raise CovNormError(
            f"line {lines[0][0]}: columns {names} have only 0 and 1, which is one column per "
            f"label. {ONE_LABEL} Name it in a column 'label'."
        )


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return line number and cells of every row that is not blank."""
    data = path.read_bytes()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CovNormError(f"line {line} is not UTF-8 text. Save the file as UTF-8.") from None
    sample = text[:50_000].splitlines()[:50]

    def regular(separator: str) -> tuple[int, int]:
        """Return how many rows are as wide as the first, if that is two or more, and name images.

        The names tell ``a.jpg,cat;dog`` from a table that is separated by semicolons.
        """
        rows = [row for row in csv.reader(sample, delimiter=separator) if row]
        width = len(rows[0]) if rows else 0
        same = [row for row in rows if len(row) == width > 1]
        return len(same), sum(any(has_image_ending(c.strip()) for c in row) for row in same)

    line = 1
    try:
        # The comma is last and loses ties, because it also occurs inside names.
        separator, stream = max("\t;,", key=regular), io.StringIO(text, newline="")
        reader = csv.reader(stream, delimiter=separator, skipinitialspace=True, strict=True)
        rows = []
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((line, [cell.strip() for cell in cells]))
            line = reader.line_num + 1
    except csv.Error as error:
        raise CovNormError(f"line {line} is not valid .csv ({error}). Correct it.") from None
    return rows


def _columns(lines: list[tuple[int, list[str]]]) -> tuple[dict[str, int], int, int]:
    """Return {column: index}, the number of columns, and the number of header lines."""
    first = [cell.casefold() for cell in lines[0][1]]
    columns = {
        column: next(first.index(name) for name in names if name in first)
        for column, names in COLUMNS.items()
        if set(names) & set(first)
    }
    if {"path", "label"} <= columns.keys():
        return columns, len(first), 1
    _check_indicators(lines)
    second = lines[1][1] if len(lines) > 1 else lines[0][1]
    if not has_image_ending(first[0]) and any(map(has_image_ending, second)):
        path, label = (" or ".join(COLUMNS[column]) for column in ("path", "label"))
        raise CovNormError(f"line 1 has no known column names. Name one {path}, another {label}.")
    width = max(2, min(3, max(len(cells) for _, cells in lines)))
    return dict(zip(COLUMNS, range(width), strict=False)), width, 0


# ── .npz ────────────────────────────────────────────────────────────────────────────────────────


def read_npz(path: Path) -> Contents:
    """Read arrays of images and labels by split."""
    arrays = _arrays(path)
    listed = arrays.pop("classes", None)
    known = None if listed is None else _class_names("classes", listed)
    if known and len(set(known)) < len(known):
        raise CovNormError("classes contains a name twice. Give every class a different name.")
    keys = {split: f"_{split}" for split in SPLITS}
    if "x_train" not in arrays:
        keys["train"] = ""  # x and y
    parts, classes = {}, known or []
    for split, key in keys.items():
        x, y = arrays.pop(f"x{key}", None), arrays.pop(f"y{key}", None)
        if x is None and y is None:
            continue
        if x is None or y is None:
            here, missing = ("y", "x") if x is None else ("x", "y")
            raise CovNormError(f"has {here}{key} but no {missing}{key}. Add it.")
        pixels, names = _pixels(f"x{key}", x), _class_names(f"y{key}", y, known)
        n = len(names)
        if len(pixels) != n:
            raise CovNormError(
                f"x{key} has {len(pixels)} rows but y{key} has {n}. Make them equal."
            )
        parts[split] = Part([f"x{key}[{i}]" for i in range(n)], names, pixels)
        if known is None and split == "train":
            classes = sorted(set(names), key=str if y.dtype.kind in "US" else int)
    notes = [f"ignored: arrays {first_few(sorted(arrays))}"] if arrays else []
    return Contents(parts, classes, notes)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return every array of the file. Arrays of objects are an error: they could run code."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except OSError:
        raise
    except Exception as error:  # zipfile and numpy raise many types for damaged bytes
        raise CovNormError(
            f"cannot be read ({error}). Save plain arrays of numbers with numpy.savez."
        ) from error


def _pixels(key: str, x: np.ndarray) -> np.ndarray:
    """Return the images as uint8 (n, h, w, 1) or (n, h, w, 3)."""
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] not in (1, 3):
        x = np.moveaxis(x, 1, 3)
    if x.ndim != 4 or x.shape[3] not in (1, 3) or min(x.shape[1:3]) < MIN_SIDE:
        raise CovNormError(
            f"{key} has shape {x.shape}: must be (n, h, w), (n, h, w, 1), (n, h, w, 3) or "
            f"(n, 3, h, w), with {MIN_SIDE} pixels or more per side"
        )
    if x.dtype.kind == "f":
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        if not (low >= 0 and high <= 1):  # or NaN
            values = f"{key} has values from {low:.4g} to {high:.4g}"
            raise CovNormError(f"{values}: floats must be in [0, 1]. Scale them, or use uint8.")
        scaled = np.empty(x.shape, np.uint8)
        for row, to in zip(x, scaled, strict=True):  # row by row, to save memory
            to[:] = np.rint(row.astype(np.float32) * 255)
        return scaled
    if x.dtype != np.uint8:
        raise CovNormError(f"{key} is {x.dtype}: must be uint8 from 0 to 255, or floats in [0, 1]")
    return x


def _class_names(key: str, y: np.ndarray, known: list[str] | None = None) -> list[str]:
    """Return the class name of every row. Labels are names, or indices into `known` if given."""
    if y.dtype.kind not in "iubUS" or y.ndim == 0 or y.shape[1:] not in ((), (1,)):
        raise CovNormError(f"{key} is {y.dtype} {y.shape}: must be integers or strings (n,)")
    y = np.char.decode(y, "utf-8") if y.dtype.kind == "S" else y
    values = (y.astype(np.uint8) if y.dtype.kind == "b" else y).reshape(-1).tolist()
    if known is None:
        return [str(value) for value in values]
    by_name = y.dtype.kind == "U"
    names: dict[Any, str] = {(name if by_name else i): name for i, name in enumerate(known)}
    wrong = sorted(set(values) - names.keys())
    if wrong:
        raise CovNormError(
            f"{key}: label {first_few(wrong)} is not one of the {len(known)} classes"
        )
    return [names[value] for value in values]
