"""Small real datasets that come with the package, for tests, benchmarks and the demo.

Sources and licenses: ``samples/LICENSES.md``. Script that made them: ``tools/make_samples.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import CovNormError, choices

SAMPLES = ("fashion", "digits", "sketches", "clipart")


class Sample(NamedTuple):
    """Images x: uint8 (n, 3, h, w), labels y: int64 (n,), and the class names.

    The images are ordered in rounds of one per class, so any first part is balanced too.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]


def load_sample(name: str) -> Sample:
    """Load one of `SAMPLES`. Gray images have three equal channels.

    ========  =======================  =======  =============  ======
    name      images                   classes  train, test    h, w
    ========  =======================  =======  =============  ======
    fashion   products, light on dark  10       1000, 500      28, 28
    digits    handwritten              10       1000, 500      28, 28
    sketches  black on white           20       1000, 500      32, 32
    clipart   color on white           10       1050, 351      64, 64
    ========  =======================  =======  =============  ======
    """
    if name not in SAMPLES:
        raise CovNormError(f"no sample {name!r}: {choices(name, SAMPLES)}")
    with np.load(Path(__file__).with_name("samples") / f"{name}.npz", allow_pickle=False) as file:
        x_train, x_test = (_rgb(torch.from_numpy(file[key])) for key in ("x_train", "x_test"))
        y_train, y_test = (torch.from_numpy(file[key]).long() for key in ("y_train", "y_test"))
        return Sample(x_train, y_train, x_test, y_test, tuple(file["classes"].tolist()))


def _rgb(images: Tensor) -> Tensor:
    """Convert (n, h, w) or (n, h, w, 3) → (n, 3, h, w), contiguous."""
    if images.ndim == 3:
        images = images[..., None].expand(-1, -1, -1, 3)
    return images.permute(0, 3, 1, 2).contiguous()
