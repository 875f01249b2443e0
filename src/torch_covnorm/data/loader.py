"""Batches of a backbone's inputs out of decoded images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def as_input(images: Tensor, how: Mapping[str, Any]) -> Tensor:
    """``(x / 255 - mean) / std``: uint8 (n, 3, h, w) → float32, channels last (faster convs)."""
    mean, std = (torch.tensor(how[k], dtype=torch.float32)[:, None, None] for k in ("mean", "std"))
    return ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


class Batches:
    """(images, labels) again and again: images (n, 3, h, w) and labels (n,) in parts of `size`.

    Shuffled ones draw from torch's random numbers, anew each time. The images may be a memory map:
    only a batch at a time is read. `progress` is called with (images so far, of how many).
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        how: Mapping[str, Any],
        size: int = 32,
        shuffle: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.images, self.labels, self.how = images, labels, how
        self.size, self.shuffle, self.progress = size, shuffle, progress

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self.images)
        order = torch.randperm(n) if self.shuffle else torch.arange(n)
        done = 0
        for part in order.split(self.size):
            done += len(part)
            yield as_input(self.images[part], self.how), self.labels[part]
            if self.progress is not None:
                self.progress(done, n)
