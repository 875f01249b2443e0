"""Seven real domains as tensors, in train, validation and test; or the paper's own, from a folder.

What is decoded once is kept, so that the next `load` takes milliseconds.
"""

from __future__ import annotations

import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torch_covnorm.data import decode, read_source
from torch_covnorm.errors import CovNormError, choices

from .fetch import PACKAGES, cache, members
from .readers import CLASSES, READERS, SEED, Pool, sizes, take, without

DOMAINS = ("objects", "products", "digits", "sketches", "drawings", "solar", "faces")
ORIGINALS = ("FGVC", "MITIndoor", "Flowers", "Caltech256", "SVHN", "SUN397", "CIFAR100")
TRAIN, VAL, TEST = 600, 200, 600  # images of a domain at most
PIXELS = 64  # side of the originals
VERSION = 1  # of the kept files
PARTS = ("train", "val", "test")


class Split(NamedTuple):
    """A domain's images x: uint8 (n, 3, h, w), labels y: int64 (n,), and the names of the labels.

    Those of `DOMAINS` come in rounds of one image a class while they last, so the first k are as
    balanced as can be.
    """

    x_train: Tensor
    y_train: Tensor
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]


def names(folder: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """`DOMAINS`, or those of `ORIGINALS` that a folder has."""
    return DOMAINS if folder is None else tuple(_originals(Path(folder)))


def load(name: str, folder: str | os.PathLike[str] | None = None) -> Split:
    """One of `names(folder)`.

    ========  =======  ================  ======  =====================================
    name      classes  train, val, test  h, w    test is
    ========  =======  ================  ======  =====================================
    objects   10       600, 200, 600     32, 32  official
    products  10       600, 200, 600     28, 28  official
    digits    10       600, 200, 600     28, 28  official
    sketches  20       600, 200, 400     32, 32  20 % of each class
    drawings  10       600, 165, 463     64, 64  from 25 % of each class
    solar     4        600, 200, 600     64, 64  from 25 % of each class
    faces     40       240, 40, 120      64, 64  30 % of each class: 6, 1, 3 a person
    ========  =======  ================  ======  =====================================

    Validation is cut from train, at most a seventh of a class. Classes are equal in each part, but
    small folders of drawings have fewer images in validation and test, and solar's parts keep the
    shares of its four very unequal classes. No image is in two parts, nor twice in one.

    With a `folder`, all images of the paper's dataset of that name in it, at 64 pixels: a folder of
    images a class, or train, val and test of such, as `torch_covnorm.data.read_source` takes them
    and cuts what is missing.
    """
    if folder is not None:
        return _original(name, Path(folder))
    if name not in DOMAINS:
        raise CovNormError(f"no domain {name!r}: {choices(name, DOMAINS)}")
    file = cache() / "domains" / f"{name}.safetensors"
    made_of = [VERSION, TRAIN, VAL, TEST, SEED.decode(), PACKAGES[name].sha256]
    # One key alone: the order of several is not the same in two files.
    about = {"domain": json.dumps({"made_of": made_of, "classes": CLASSES[name]})}
    if not _is_kept(file, about):
        tensors = _build(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.part")
        safetensors.torch.save_file(tensors, temporary, about)
        temporary.replace(file)
    return Split(**safetensors.torch.load_file(file), classes=CLASSES[name])


def stated() -> dict[str, tuple[int, tuple[int, ...]]]:
    """{domain: (classes, images to train, validate and test)} of ours, as `load` states them."""
    found = re.findall(r"^ *(\w+) +(\d+) +(\d+, \d+, \d+) ", load.__doc__ or "", re.M)
    return {n: (int(classes), tuple(map(int, p.split(", ")))) for n, classes, p in found}


def _is_kept(file: Path, about: dict[str, str]) -> bool:
    try:
        with safetensors.safe_open(file, "pt") as kept:
            return kept.metadata() == about
    except (OSError, safetensors.SafetensorError):
        return False


def _build(name: str) -> dict[str, Tensor]:
    files = members(name)
    print(f"decoding {name}", flush=True)
    train, test = READERS[name](files)
    unequal = name == "solar"
    val = _draw(train, VAL, unequal, share=7)
    chosen = (_draw(without(train, val), TRAIN, unequal), val, _draw(test, TEST, unequal))
    tensors = {}
    for part, images in zip(PARTS, chosen, strict=True):
        x = torch.from_numpy(np.stack([image for image, _ in images.values()]))
        x = x[..., None].expand(-1, -1, -1, 3) if x.ndim == 3 else x
        tensors[f"x_{part}"] = x.permute(0, 3, 1, 2).contiguous()
        tensors[f"y_{part}"] = torch.tensor([label for _, label in images.values()])
    return tensors


def _draw(images: Pool, n: int, unequal: bool, share: int = 1) -> Pool:
    """At most n images, of no class more than one in `share` nor more than its part of n.

    That part is the same for all classes, or proportional to their sizes where `unequal`.
    """
    there = {label: size // share for label, size in sizes(images).items()}
    total = sum(there.values())
    part = {k: -(-n * size // total) if unequal else n // len(there) for k, size in there.items()}
    quota = {label: min(size, part[label]) for label, size in there.items()}
    return dict(islice(take(images, quota).items(), n))  # rounded up, the parts may be n + 3


# ── the paper's datasets ────────────────────────────────────────────────────────────────────────


def _originals(folder: Path) -> dict[str, Path]:
    """{name: its folder}, in the paper's order; upper and lower case are the same."""
    inside = {f.name.casefold(): f for f in sorted(folder.iterdir())} if folder.is_dir() else {}
    found = {n: inside[n.casefold()] for n in ORIGINALS if n.casefold() in inside}
    if not found:
        wanted = ", ".join(ORIGINALS)
        raise CovNormError(f"{folder}: has none of the folders {wanted}: put one there at least")
    return found


def _original(name: str, folder: Path) -> Split:
    found = _originals(folder)
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
