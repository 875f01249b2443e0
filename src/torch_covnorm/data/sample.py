"""Small real domains that come with the package, for tests, benchmarks and the demo.

Where they come from and under which licences: ``samples/LICENSES.md``. How they were made:
``tools/make_samples.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CovNormError, choices

SAMPLES = ("fashion", "digits", "sketches", "clipart")


class Sample(NamedTuple):
    """A domain's images x: uint8 (n, 3, h, w), labels y: int64 (n,), and the names of the labels.

    They come in rounds of one image a class, so the first k are balanced too.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]


def load_sample(name: str) -> Sample:
    """One of `SAMPLES`. Grey images come as three equal channels.

    ========  =======================  =======  =============  ======
    name      images                   classes  train, test    h, w
    ========  =======================  =======  =============  ======
    fashion   products, light on dark  10       1000, 500      28, 28
    digits    handwritten              10       1000, 500      28, 28
    sketches  black on white           20       1000, 500      32, 32
    clipart   colour on white          10       1050, 351      64, 64
    ========  =======================  =======  =============  ======
    """
    if name not in SAMPLES:
        raise CovNormError(f"no sample {name!r}; {choices(name, SAMPLES)}")
    import numpy as np

    with np.load(Path(__file__).with_name("samples") / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    return Sample(
        _rgb(torch.from_numpy(arrays["x_train"])),
        torch.from_numpy(arrays["y_train"]).long(),
        _rgb(torch.from_numpy(arrays["x_test"])),
        torch.from_numpy(arrays["y_test"]).long(),
        tuple(arrays["classes"].tolist()),
    )


def _rgb(images: Tensor) -> Tensor:
    """(n, h, w) or (n, h, w, 3) → (n, 3, h, w), contiguous."""
    if images.ndim == 3:
        images = images[..., None].expand(-1, -1, -1, 3)
    return images.permute(0, 3, 1, 2).contiguous()


def prepare(
    images: Tensor,
    size: int,
    mean: float | Sequence[float],
    std: float | Sequence[float],
    *,
    channels_last: bool = False,
) -> Tensor:
    """What a backbone reads: (resize(x)/255 − mean)/std, float32 (n, 3, size, size).

    ``images`` is uint8 (n, 3, h, w); ``mean`` and ``std`` are in units of [0, 1], one number or one
    a channel. Bilinear; when it shrinks, each pixel averages all that it covers (antialiased).
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        found = f"{images.dtype} {tuple(images.shape)}"
        raise CovNormError(f"images are {found}; give uint8 (n, 3, h, w), as load_sample does")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = images.float()
    if images.shape[2:] != (size, size):
        x = functional.interpolate(x, size=(size, size), mode="bilinear", antialias=True)
    shift = torch.as_tensor(mean, dtype=torch.float32, device=x.device).reshape(-1, 1, 1)
    scale = torch.as_tensor(std, dtype=torch.float32, device=x.device).reshape(-1, 1, 1)
    return ((x / 255 - shift) / scale).contiguous(memory_format=layout)
