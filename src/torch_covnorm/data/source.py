"""A user's images with their classes: a folder, a .csv or an .npz, read but not yet decoded."""

from __future__ import annotations

import csv
import io
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CovNormError, choices
from ..records import blame
from .splits import SPLITS, Items, Part, complete, few, labelled

SMALLEST = 8  # pixels on a side
ENDINGS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .tif .tiff .pgm .ppm .pbm .pnm .gif".split()  # noqa: SIM905
)
SYNONYMS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
COLUMNS = {
    "path": ("path", "file", "filename", "image"),
    "label": ("label", "class", "target"),
    "split": ("split",),
}
CONVENTION = (
    "give a folder with one folder of images a class (or train/, val/ and test/ of such), a .csv "
    "with path,label[,split] or an .npz with x_train and y_train"
)


@dataclass(frozen=True, eq=False)
class Source:
    """Where images are and what they show.

    Attributes:
        path: what the user gave.
        kind: "folder", "csv" or "npz".
        classes: names of the labels, in their order.
        splits: "train", and "val" and "test" where there are any.
        notes: what was left out or is unusual, in sentences for the user.
    """

    path: Path
    kind: str
    classes: tuple[str, ...]
    splits: dict[str, Items]
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the names of its images start."""
        return self.path if self.kind == "folder" else self.path.parent


class _Found(NamedTuple):
    parts: dict[str, Part]
    classes: Sequence[str]  # in their order; maybe more than train has
    notes: list[str]


def read_source(path: str | os.PathLike[str], *, seed: int = 0) -> Source:
    """The images and classes at a path.

    A folder has one folder of images a class, or ``train/``, ``val/`` (``valid/``,
    ``validation/``) and ``test/`` of such. It has splits if it holds nothing else, or if its
    ``train/`` has folders of its own. Folders inside a class belong to it, links are followed.
    Hidden files and those without the ending of an image are left out, with a note.

    A .csv has ``path,label`` or ``path,label,split``, separated by commas, semicolons or tabs;
    paths start at its own folder. With a header, columns are found by name: path, file, filename
    or image; label, class or target; split.

    An .npz has ``x_train`` and ``y_train``, maybe ``x_val``, ``y_val``, ``x_test``, ``y_test``; or
    ``x`` and ``y``; and maybe ``classes``. x is uint8 or float in [0, 1]: (n, h, w), (n, h, w, 1),
    (n, h, w, 3) or (n, 3, h, w). y are whole numbers or strings.

    Classes are those of train, sorted by name, or in the order of an .npz's numbers or `classes`.
    One without training images is left out, with a note. Missing splits are cut by `seed` as
    `splits.complete` says.
    """
    path = Path(path)
    with blame(path):
        if path.is_dir():
            kind, found = "folder", _read_folder(path)
        elif not path.exists():
            raise CovNormError(f"is not there: {CONVENTION}")
        elif not path.is_file() or path.suffix.lower() not in (".csv", ".tsv", ".npz"):
            archive = path.suffix.lower() in (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")
            first = "is an archive: unpack it, and " if archive else "is no source of images: "
            raise CovNormError(first + CONVENTION)
        elif path.suffix.lower() == ".npz":
            kind, found = "npz", _read_npz(path)
        else:
            kind, found = "csv", _read_csv(path)
        train = set(found.parts["train"].classes) if "train" in found.parts else set()
        if not train:
            why = f" ({'; '.join(found.notes)})" if found.notes else ""
            raise CovNormError(f"has no images to train with{why}: {CONVENTION}")
        classes = tuple(c for c in found.classes if c in train)
        empty = [c for c in found.classes if c not in train]
        if empty:
            found.notes.append(f"left out, without training images: class {few(empty)}")
        splits = complete(labelled(found.parts, classes), seed)
    return Source(path, kind, classes, splits, tuple(found.notes))


# ── folders ─────────────────────────────────────────────────────────────────────────────────────


def _read_folder(root: Path) -> _Found:
    ignored: Counter[str] = Counter()
    parts, order = {}, set()
    for name, split in _split_folders(root, ignored).items():
        names: list[str] = []
        classes: list[str] = []
        for folder in _listed(root / name, ignored):
            label = unicodedata.normalize("NFC", folder)  # one disk's é is another's e and accent
            if split == "train":
                order.add(label)
            start = f"{name}/{folder}" if name else folder
            images = sorted(_walk(root, start, [root, root / name], ignored))
            names += images
            classes += [label] * len(images)
        parts[split] = Part(names, classes)
    counts = ", ".join(f"{what} ({n})" for what, n in sorted(ignored.items()) if n)
    return _Found(parts, sorted(order), [f"ignored: {counts}"] if counts else [])


def _split_folders(root: Path, ignored: Counter[str]) -> dict[str, str]:
    """Folders of splits and which they are; ``{"": "train"}`` where the root holds the classes."""
    top = _listed(root, Counter())
    named = {n: SYNONYMS[n.casefold()] for n in top if n.casefold() in SYNONYMS}
    trains = [n for n, split in named.items() if split == "train"]
    if not named or (
        len(named) < len(top) and not any(_listed(root / n, Counter()) for n in trains)
    ):
        return {"": "train"}
    for split, n in Counter(named.values()).items():
        if n > 1:
            both = [n for n in named if named[n] == split]
            raise CovNormError(f"has {few(both)}, which mean the same: keep one of them")
    if not trains:
        raise CovNormError(f"has {few(list(named))} but no train/: {CONVENTION}")
    _listed(root, ignored)
    ignored["folders beside train/"] += len(top) - len(named)
    return {n: split for split in SPLITS for n in named if named[n] == split}


def _listed(folder: Path, ignored: Counter[str]) -> list[str]:
    """Names of the folders in a folder, sorted."""
    folders = []
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            ignored["hidden files"] += 1
        elif _is_folder(entry):
            folders.append(entry.name)
        else:
            ignored["files beside the class folders"] += 1
    return sorted(folders)


def _walk(root: Path, start: str, above: list[Path], ignored: Counter[str]) -> Iterator[str]:
    """Every image below ``root/start``, as a path from the root.

    A folder is entered once and none of those above it ever, so links end wherever they lead.
    """
    seen = {_identity(folder) for folder in above}
    waiting = [start]
    while waiting:
        folder = waiting.pop()
        with blame(root / folder):
            identity, entries = _identity(root / folder), list(os.scandir(root / folder))
        if identity in seen:
            ignored["links to folders that are read already"] += 1
            continue
        seen.add(identity)
        for entry in entries:
            if entry.name.startswith("."):
                ignored["hidden files"] += 1
            elif _is_folder(entry):
                waiting.append(f"{folder}/{entry.name}")
            elif _ending(entry.name) in ENDINGS:
                yield f"{folder}/{entry.name}"
            else:
                ending = _ending(entry.name)
                ignored[f"*{ending} files" if ending else "files without an ending"] += 1


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a million Paths are slow


# ── .csv ────────────────────────────────────────────────────────────────────────────────────────


def _read_csv(path: Path) -> _Found:
    lines = _lines(path)
    columns, width, header = _columns(lines)
    rows: dict[tuple[str, str], tuple[str, int]] = {}  # (split, path): label, line
    bad, repeated = [], 0
    for line, cells in lines[header:]:
        row = {what: cells[i] if i < len(cells) else "" for what, i in columns.items()}
        missing = [what for what, cell in row.items() if not cell]
        label = unicodedata.normalize("NFC", row["label"])
        split = SYNONYMS.get(row.get("split", "train").casefold(), "")
        before = rows.get((split, row["path"]))
        if missing:
            bad.append(f"line {line} has no {missing[0]}")
        elif len(cells) > width:
            bad.append(f"line {line} has {len(cells)} columns instead of {width}")
        elif not split:
            bad.append(f"line {line} has split {row['split']!r}, {choices(row['split'], SPLITS)}")
        elif before and before[0] != label:
            bad.append(f"line {line} has label {label!r} for the image of line {before[1]}")
        elif before:
            repeated += 1
        else:
            rows[split, row["path"]] = label, line
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise CovNormError("; ".join(bad[:3]) + more + ": correct or remove these lines")
    parts = {s: Part([], []) for s in SPLITS}
    for (split, name), (label, _) in rows.items():
        parts[split].names.append(name)
        parts[split].classes.append(label)
    notes = [f"ignored: lines that repeat another ({repeated})"] if repeated else []
    return _Found(parts, sorted(set(parts["train"].classes)), notes)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Line numbers and cells of every row that is not blank."""
    data = path.read_bytes()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CovNormError(f"line {line} is no UTF-8 text: save the file as UTF-8") from None
    sample = text[:50_000].splitlines()[:50]

    def regular(separator: str) -> int:
        """How many rows of the sample have the width of the first, if that is two or more."""
        widths = [len(row) for row in csv.reader(sample, delimiter=separator) if row]
        return widths.count(widths[0]) if widths and widths[0] > 1 else 0

    line = 1
    try:
        # A comma is likelier to stand inside a name than the others: it must be more regular.
        reader = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=max("\t;,", key=regular),
            skipinitialspace=True,
            strict=True,
        )
        rows = []
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((line, [cell.strip() for cell in cells]))
            line = reader.line_num + 1
    except csv.Error as error:
        raise CovNormError(f"the row of line {line} is no .csv ({error}): correct it") from None
    return rows


def _columns(lines: list[tuple[int, list[str]]]) -> tuple[dict[str, int], int, int]:
    """Where path, label and split are, of how many columns, below how many lines of header."""
    if not lines:
        raise CovNormError(f"is empty: {CONVENTION}")
    first = [cell.casefold() for cell in lines[0][1]]
    places = {
        what: next((first.index(name) for name in names if name in first), -1)
        for what, names in COLUMNS.items()
    }
    found = {what: place for what, place in places.items() if place >= 0}
    if {"path", "label"} <= found.keys():
        return found, len(first), 1
    second = lines[1][1] if len(lines) > 1 else lines[0][1]
    if _ending(first[0]) not in ENDINGS and any(_ending(cell) in ENDINGS for cell in second):
        path, label = ("one of " + ", ".join(COLUMNS[what]) for what in ("path", "label"))
        raise CovNormError(f"line 1 has no name that is known: call a column {path}; and {label}")
    width = max(2, min(3, max(len(cells) for _, cells in lines)))
    return dict(zip(COLUMNS, range(width), strict=False)), width, 0


# ── .npz ────────────────────────────────────────────────────────────────────────────────────────


def _read_npz(path: Path) -> _Found:
    arrays = _arrays(path)
    listed = arrays.pop("classes", None)
    known = None if listed is None else _class_names("classes", listed)
    if known and len(set(known)) < len(known):
        raise CovNormError("classes has a name twice: give every class its own")
    keys = {split: f"_{split}" for split in SPLITS}
    if "x_train" not in arrays:
        keys["train"] = ""  # x and y
    parts, classes = {}, known or []
    for split, key in keys.items():
        x, y = arrays.pop(f"x{key}", None), arrays.pop(f"y{key}", None)
        if x is None and y is None:
            continue
        if x is None or y is None:
            raise CovNormError(f"has {'y' if x is None else 'x'}{key} alone: x needs its y")
        pixels, names = _pixels(f"x{key}", x), _class_names(f"y{key}", y, known)
        if len(pixels) != len(names):
            raise CovNormError(
                f"x{key} has {len(pixels)} rows and y{key} {len(names)}: they must agree"
            )
        parts[split] = Part([f"x{key}[{i}]" for i in range(len(names))], names, pixels)
        if known is None and split == "train":
            classes = sorted(set(names), key=str if y.dtype.kind in "US" else int)
    notes = [f"ignored: arrays {few(sorted(arrays))}"] if arrays else []
    return _Found(parts, classes, notes)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of the archive. Arrays of objects are refused: they could run code."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except OSError:
        raise
    except Exception as error:  # damaged bytes make zipfile and numpy raise nearly anything
        raise CovNormError(
            f"cannot be read ({error}): save plain arrays of numbers with numpy.savez"
        ) from error


def _pixels(key: str, x: np.ndarray) -> np.ndarray:
    """uint8 (n, h, w, 1) or (n, h, w, 3)."""
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] not in (1, 3):
        x = np.moveaxis(x, 1, 3)
    if x.ndim != 4 or x.shape[3] not in (1, 3) or min(x.shape[1:3]) < SMALLEST:
        raise CovNormError(
            f"{key} has shape {x.shape}: give (n, h, w), (n, h, w, 1), (n, h, w, 3) or "
            f"(n, 3, h, w), with {SMALLEST} pixels or more on a side"
        )
    if x.dtype.kind == "f":
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        if not (low >= 0 and high <= 1):  # nor NaN
            raise CovNormError(
                f"{key} has numbers from {low:.4g} to {high:.4g}: floats must lie in [0, 1]: "
                "scale them, or give uint8"
            )
        scaled = np.empty(x.shape, np.uint8)
        for row, to in zip(x, scaled, strict=True):  # a float copy of all could be too much
            to[:] = np.rint(row.astype(np.float32) * 255)
        return scaled
    if x.dtype != np.uint8:
        raise CovNormError(f"{key} is {x.dtype}: give uint8 from 0 to 255, or floats in [0, 1]")
    return x


def _class_names(key: str, y: np.ndarray, known: list[str] | None = None) -> list[str]:
    """The class of every row: a label is its name, or a number, which is a place in `known`."""
    if y.dtype.kind not in "iubUS" or y.ndim == 0 or y.shape[1:] not in ((), (1,)):
        raise CovNormError(f"{key} is {y.dtype} {y.shape}: give whole numbers or strings (n,)")
    y = np.char.decode(y, "utf-8") if y.dtype.kind == "S" else y
    values = (y.astype(np.uint8) if y.dtype.kind == "b" else y).reshape(-1).tolist()
    if known is None:
        return [str(value) for value in values]
    names: dict[Any, str] = dict(zip(known, known, strict=True))
    if y.dtype.kind != "U":
        names = dict(enumerate(known))
    wrong = sorted(set(values) - names.keys())
    if wrong:
        raise CovNormError(
            f"{key} has label {few(wrong)}, which is none of the {len(known)} classes"
        )
    return [names[value] for value in values]
