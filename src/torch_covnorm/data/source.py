"""Find a user's labeled images in a folder, a .csv or an .npz, without decoding them."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CovNormError
from ..records import blame
from .image_files import has_image_ending
from .splits import SPLITS, SYNONYMS, Contents, Items, Part, complete, first_few, labelled
from .tables import read_csv, read_npz

ACCEPTED = (
    "Use a folder with one subfolder of images per class (or train/, val/ and test/ folders of "
    "that form), a .csv with path,label[,split], or an .npz with x_train and y_train."
)
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")


@dataclass(frozen=True, eq=False)
class Source:
    """Where images are and what they show.

    Attributes:
        path: the path that the user gave.
        format: "folder", "csv" or "npz".
        classes: class names in the order of the labels.
        splits: "train", and "val" and "test" if there are any.
        notes: what was left out or is unusual, for the user.
    """

    path: Path
    format: str
    classes: tuple[str, ...]
    splits: dict[str, Items]
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that the names of the images are relative to."""
        return self.path if self.format == "folder" else self.path.parent


def read_source(path: str | os.PathLike[str], *, seed: int = 0) -> Source:
    """Find the images and classes at a path.

    A folder has one subfolder of images per class, or ``train/``, ``val/`` (``valid/``,
    ``validation/``) and ``test/`` folders of that form, which count as splits if there is nothing
    else or ``train/`` has subfolders. Folders inside a class belong to it. Links are followed.
    Hidden files and files without the ending of an image are left out, with a note.

    A .csv has ``path,label[,split]``, separated by commas, semicolons or tabs, with paths relative
    to its folder. A header may name the columns: path, file, filename or image; label, class or
    target; split.

    An .npz has ``x_train`` and ``y_train``, optionally ``x_val``, ``y_val``, ``x_test`` and
    ``y_test``; or ``x`` and ``y``; and optionally ``classes``. x is uint8 or float in [0, 1]:
    (n, h, w), (n, h, w, 1), (n, h, w, 3) or (n, 3, h, w). y is integers or strings.

    Classes are those of train, sorted by name, or in the order of the numbers or `classes` of an
    .npz. A class without training images is left out, with a note. Missing splits are taken from
    train as `splits.complete` says, by `seed`.
    """
    path = Path(path)
    ending = path.suffix.lower()
    with blame(path):
        if path.is_dir():
            format_, contents = "folder", _read_folder(path)
        elif not path.exists():
            raise CovNormError(f"does not exist. {ACCEPTED}")
        elif path.is_file() and ending == ".npz":
            format_, contents = "npz", read_npz(path)
        elif path.is_file() and ending in (".csv", ".tsv"):
            format_, contents = "csv", read_csv(path)
        else:
            archive = ending in ARCHIVES
            problem = "is an archive. Unpack it." if archive else "is not a source of images."
            raise CovNormError(f"{problem} {ACCEPTED}")
        parts, listed, notes = contents
        train = set(parts["train"].classes) if "train" in parts else set()
        if not train:
            why = f" ({'; '.join(notes)})" if notes else ""
            raise CovNormError(f"no images to train with{why}. {ACCEPTED}")
        classes = tuple(c for c in listed if c in train)
        for name in classes:
            if name.encode(errors="ignore").decode() != name:  # undecodable bytes of a file name
                raise CovNormError(f"class {name!r}: its name is not valid text. Rename it.")
        if empty := [c for c in listed if c not in train]:
            notes.append(f"left out, without training images: class {first_few(empty)}")
        splits = complete(labelled(parts, classes), seed)
    return Source(path, format_, classes, splits, tuple(notes))


def images_below(folder: Path) -> list[Path]:
    """Return every image in a folder and its subfolders, sorted; hidden files are left out."""
    return sorted(folder / name for name in _walk(folder, ".", [], Counter()))


# ── folders ─────────────────────────────────────────────────────────────────────────────────────


def _read_folder(root: Path) -> Contents:
    ignored: Counter[str] = Counter()
    parts, order = {}, set()
    for name, split in _split_folders(root, ignored).items():
        names: list[str] = []
        classes: list[str] = []
        for folder in _subfolders(root / name, ignored):
            label = unicodedata.normalize("NFC", folder)  # disks store an é in different ways
            if split == "train":
                order.add(label)
            start = f"{name}/{folder}" if name else folder
            images = sorted(_walk(root, start, [root, root / name], ignored))
            names += images
            classes += [label] * len(images)
        parts[split] = Part(names, classes)
    counts = ", ".join(f"{what} ({n})" for what, n in sorted(ignored.items()) if n)
    return Contents(parts, sorted(order), [f"ignored: {counts}"] if counts else [])


def _split_folders(root: Path, ignored: Counter[str]) -> dict[str, str]:
    """Return ``{folder: split}``, or ``{"": "train"}`` if the root holds the classes."""
    top = _subfolders(root, Counter())
    named = {split: [n for n in top if SYNONYMS.get(n.casefold()) == split] for split in SPLITS}
    others = len(top) - sum(map(len, named.values()))
    nested = any(_subfolders(root / n, Counter()) for n in named["train"])
    if others == len(top) or (others and not nested):
        return {"": "train"}
    for same in named.values():
        if len(same) > 1:
            raise CovNormError(f"has {first_few(same)}, which mean the same. Keep one of them.")
    if not named["train"]:
        raise CovNormError(f"has {first_few(top)} but no train/. {ACCEPTED}")
    _subfolders(root, ignored)
    ignored["folders beside train/"] += others
    return {names[0]: split for split, names in named.items() if names}


def _subfolders(folder: Path, ignored: Counter[str]) -> list[str]:
    """Return the names of the folders in a folder, sorted."""
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
    """Yield every image below ``root/start``, as a path relative to the root.

    No folder is entered twice, nor any folder in `above`, so links cannot form a loop.
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
            elif has_image_ending(entry.name):
                yield f"{folder}/{entry.name}"
            else:
                ending = Path(entry.name).suffix.lower()
                ignored[f"*{ending} files" if ending else "files without an ending"] += 1


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
