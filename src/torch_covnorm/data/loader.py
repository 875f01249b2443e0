"""Batches of network inputs from decoded images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .images import normalise


def as_input(images: Tensor, preprocessing: Mapping[str, Any]) -> Tensor:
    """Return ``(x / 255 - mean) / std``: uint8 (n, 3, h, w) → float32, channels last."""
    x = normalise(images, preprocessing["mean"], preprocessing["std"])
    return x.contiguous(memory_format=torch.channels_last)  # faster convolutions


@dataclass(eq=False)
class Batches:
    """A loader of (images, labels), from images (n, 3, h, w) and labels (n,).

    `size` is the batch size. With `shuffle`, every iteration draws a new order from torch's random
    numbers. The images may be a memory map: only one batch at a time is read. `progress` is called
    with (images done, total).
    """

    images: Tensor
    labels: Tensor
    preprocessing: Mapping[str, Any]
    size: int = 32
    shuffle: bool = False
    progress: Callable[[int, int], None] | None = None

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self.images)
        order = torch.randperm(n) if self.shuffle else torch.arange(n)
        done = 0
        for part in order.split(self.size):
            done += len(part)
            yield as_input(self.images[part], self.preprocessing), self.labels[part]
            if self.progress is not None:
                self.progress(done, n)
