"""Seven real domains as tensors, in train, validation and test parts.

Decoded images are cached, so that the next `load` takes milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torch_covnorm.errors import CovNormError, choices

from .fetch import PACKAGES, cache, members
from .readers import CLASSES, READERS, SEED, Pool, sizes, take, without

DOMAINS = ("objects", "products", "digits", "sketches", "drawings", "solar", "faces")
# {domain: (classes, images in train, validation and test)}
SIZES = {
    "objects": (10, (600, 200, 600)),
    "products": (10, (600, 200, 600)),
    "digits": (10, (600, 200, 600)),
    "sketches": (20, (600, 200, 400)),
    "drawings": (10, (600, 165, 463)),
    "solar": (4, (600, 200, 600)),
    "faces": (40, (240, 40, 120)),
}
TRAIN, VAL, TEST = 600, 200, 600  # the most images of a domain in each part
VERSION = 1  # of the cached files
PARTS = ("train", "val", "test")


class Split(NamedTuple):
    """A domain's images x: uint8 (n, 3, h, w), labels y: int64 (n,), and the names of the labels.

    The images of `DOMAINS` come in rounds of one image per class while they last, so the first k
    are as balanced as possible.
    """

    x_train: Tensor
    y_train: Tensor
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]


def load(name: str) -> Split:
    """Load one of `DOMAINS`.

    ========  =======  ================  ======  =====================================
    name      classes  train, val, test  h, w    test is
    ========  =======  ================  ======  =====================================
    objects   10       600, 200, 600     32, 32  official
    products  10       600, 200, 600     28, 28  official
    digits    10       600, 200, 600     28, 28  official
    sketches  20       600, 200, 400     32, 32  20 % of each class
    drawings  10       600, 165, 463     64, 64  from 25 % of each class
    solar     4        600, 200, 600     64, 64  from 25 % of each class
    faces     40       240, 40, 120      64, 64  30 % of each class (6, 1, 3)
    ========  =======  ================  ======  =====================================

    Validation images are split from train, at most a seventh of a class. Classes are equal in each
    part, except that small classes of drawings have fewer images in validation and test, and solar
    keeps the shares of its four very unequal classes. No image is in two parts, or twice in one.
    """
    if name not in DOMAINS:
        raise CovNormError(f"no domain {name!r}: {choices(name, DOMAINS)}")
    file = cache() / "domains" / f"{name}.safetensors"
    made_of = [VERSION, TRAIN, VAL, TEST, SEED.decode(), PACKAGES[name].sha256]
    # Only one key: the order of several keys differs between files.
    about = {"domain": json.dumps({"made_of": made_of, "classes": CLASSES[name]})}
    return Split(**kept(file, about, lambda: _build(name)), classes=CLASSES[name])


def kept(
    file: Path, about: Mapping[str, str], build: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of a file with this metadata; build and cache them if there is none."""
    if not _is_kept(file, about):
        tensors = build()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.part")
        safetensors.torch.save_file(tensors, temporary, dict(about))
        temporary.replace(file)
    return safetensors.torch.load_file(file)


def _is_kept(file: Path, about: Mapping[str, str]) -> bool:
    try:
        with safetensors.safe_open(file, "pt") as found:
            return bool(found.metadata() == about)
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
    """Take at most n images: per class at most one in `share`, and at most its part of n.

    The part is the same for all classes, or proportional to their sizes if `unequal`.
    """
    there = {label: size // share for label, size in sizes(images).items()}
    total = sum(there.values())
    part = {k: -(-n * size // total) if unequal else n // len(there) for k, size in there.items()}
    quota = {label: min(size, part[label]) for label, size in there.items()}
    return dict(islice(take(images, quota).items(), n))  # rounding up may give n + 3
