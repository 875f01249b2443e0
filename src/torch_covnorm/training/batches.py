"""Data as people have it: every batch becomes (images, labels), every Dataset a loader of batches.

All loops of the package read their batches here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..errors import CovNormError
from ..network.domain import Domain

BATCH = 32  # images, if a Dataset is given instead of a loader
IMAGES, LABELS = ("pixel_values", "image", "images"), ("labels", "label")  # keys of batches
PerChannel = float | Sequence[float] | Tensor


@dataclass(frozen=True)
class Loader:
    """The batches of a loader as `unpack` returns them; its other attributes are the loader's."""

    batches: Any
    preprocessing: Any
    labels: bool

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for batch in self.batches:
            images, labels = unpack(batch, self.preprocessing)
            if labels is None and self.labels:
                raise CovNormError(
                    "the loader yields only images: yield (images, labels), or dictionaries with "
                    "the key 'labels'"
                )
            yield images, labels

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)

    def __getattr__(self, name: str) -> Any:
        if name in Loader.__annotations__:  # not there yet: this is a copy in the making
            raise AttributeError(name)
        return getattr(self.batches, name)


def as_loader(
    data: Any,
    preprocessing: Any = None,
    *,
    shuffle: bool = False,
    again: bool = False,
    labels: bool = True,
) -> Any:
    """Return a loader of (images, labels) as the network takes them; None for None.

    Args:
        data: a DataLoader, any other iterable of batches, or a Dataset of samples: one of
            `torch.utils.data` (map-style or iterable), or one of Hugging Face. A Dataset is read in
            batches of 32.
        preprocessing: of the domain, or of the backbone; see `unpack`.
        shuffle: draw the order of a map-style Dataset at random, in every epoch.
        again: refuse what can be iterated only once.
        labels: refuse batches without labels.
    """
    if data is None or isinstance(data, Loader):
        return data
    if isinstance(data, Dataset) or hasattr(data, "column_names"):  # the latter: Hugging Face's
        random = shuffle and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
        generator = torch.Generator()  # its own, so that `fit` can seed it
        data = DataLoader(data, BATCH, random, generator=generator, collate_fn=_collate)
    # Loaders of other libraries may be iterators that start over; those of Python never do.
    python = type(data).__module__ in ("builtins", "itertools")
    if again and isinstance(data, Iterator) and python:
        raise CovNormError(
            f"a {type(data).__name__} can be iterated only once, and this needs several passes: "
            "give a DataLoader, a Dataset, or a list of batches"
        )
    return Loader(data, preprocessing, labels)


def images_of(batch: Any) -> Any:
    """Return the images of a batch as they are."""
    return parts_of(batch)[0]


def parts_of(batch: Any) -> tuple[Any, Any]:
    """Return the images and labels of a batch as they are; labels are None if it has none.

    A batch is (images, labels, …), a dictionary with one key of `IMAGES` and perhaps one of
    `LABELS`, or only images.
    """
    if isinstance(batch, Mapping):
        found = [next((k for k in keys if k in batch), None) for keys in (IMAGES, LABELS)]
        if found[0] is None:
            raise CovNormError(
                f"a batch has the keys {', '.join(map(repr, batch))}, but no images: name them "
                f"{' or '.join(map(repr, IMAGES))}"
            )
        return batch[found[0]], None if found[1] is None else batch[found[1]]
    if isinstance(batch, tuple | list):
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


def unpack(batch: Any, preprocessing: Any = None) -> tuple[Tensor, Tensor | None]:
    """Return (images, labels) of a batch as tensors, the images as the network takes them.

    Bytes, uint8 (n, 3, h, w) or (n, h, w, 3), become ``(x / 255 - mean) / std``. Numbers of other
    types are taken as they are.

    Args:
        preprocessing: of the domain or the backbone, with "mean" and "std".
    """
    images, labels = parts_of(batch)
    try:
        images = torch.stack([*images]) if isinstance(images, list) else torch.as_tensor(images)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CovNormError(
            f"the images of a batch are not tensors of one shape ({error}): resize them and make "
            "them tensors in the dataset's transform"
        ) from None
    if images.dtype == torch.uint8:
        known = isinstance(preprocessing, Mapping) and {"mean", "std"} <= set(preprocessing)
        if not known or None in (preprocessing["mean"], preprocessing["std"]):
            raise CovNormError(
                "the images are uint8, and neither the domain nor the backbone says how to "
                "normalize them: add the domain with preprocessing={'mean': …, 'std': …}, or make "
                "them float32 in the loader"
            )
        if images.ndim == 4 and images.shape[-1] == 3 != images.shape[1]:
            images = images.permute(0, 3, 1, 2)
        images = normalise(images, preprocessing["mean"], preprocessing["std"])
    try:
        return images, None if labels is None else torch.as_tensor(labels)
    except (TypeError, ValueError) as error:
        raise CovNormError(
            f"the labels of a batch are not numbers ({error}): number the classes from 0"
        ) from None


def normalise(images: Tensor, mean: PerChannel, std: PerChannel) -> Tensor:
    """Return ``(x / 255 - mean) / std`` per channel as float32: (…, 3, h, w) → (…, 3, h, w)."""
    shift, scale = (
        torch.as_tensor(v, dtype=torch.float32, device=images.device).reshape(-1, 1, 1)
        for v in (mean, std)
    )
    return (images.float() / 255 - shift) / scale


def labels_of(labels: Any, domain: Domain) -> Tensor:
    """Return labels as a tensor, class numbers as int64. The head must have every class."""
    labels = torch.as_tensor(labels)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return labels
    classes = domain.width
    if labels.numel() and classes is not None and not domain.runs_own:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise CovNormError(
                f"domain {domain.name!r}: label {low if low < 0 else high} is out of range, "
                f"because its head has {classes} classes. Set classes= when you add the domain."
            )
    return labels.long()


def _collate(samples: list[Any]) -> Any:
    """Make a batch of samples; images that are not tensors of one shape are an error."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        raise CovNormError(
            f"the samples of the Dataset cannot be made a batch ({str(error).splitlines()[0]}): "
            "resize the images and make them tensors in its transform"
        ) from None
