"""A user's images with their classes: a folder, a .csv or an .npz, read but not yet decoded."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CovNormError
from ..records import blame
from .convention import CONVENTION, ENDINGS, SYNONYMS, Found, ending_of
from .splits import SPLITS, Items, Part, complete, few, labelled
from .tables import read_csv, read_npz


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
            kind, found = "npz", read_npz(path)
        else:
            kind, found = "csv", read_csv(path)
        train = set(found.parts["train"].classes) if "train" in found.parts else set()
        if not train:
            why = f" ({'; '.join(found.notes)})" if found.notes else ""
            raise CovNormError(f"has no images to train with{why}: {CONVENTION}")
        classes = tuple(c for c in found.classes if c in train)
        if odd := [c for c in classes if _is_no_text(c)]:
            raise CovNormError(f"class {odd[0]!r}: its name is no plain text: rename it")
        empty = [c for c in found.classes if c not in train]
        if empty:
            found.notes.append(f"left out, without training images: class {few(empty)}")
        splits = complete(labelled(found.parts, classes), seed)
    return Source(path, kind, classes, splits, tuple(found.notes))


def _is_no_text(name: str) -> bool:
    """Whether a name holds bytes that no encoding made."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return False


# ── folders ─────────────────────────────────────────────────────────────────────────────────────


def _read_folder(root: Path) -> Found:
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
    return Found(parts, sorted(order), [f"ignored: {counts}"] if counts else [])


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
            elif ending_of(entry.name) in ENDINGS:
                yield f"{folder}/{entry.name}"
            else:
                ending = ending_of(entry.name)
                ignored[f"*{ending} files" if ending else "files without an ending"] += 1


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
