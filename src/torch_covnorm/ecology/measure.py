"""What the store keeps of a domain's results: accuracy, confusion, examples, spectra, sizes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from ..compress.precision import PRECISIONS, round_, storage_of, stored_bytes
from ..data.decode import Decoded
from ..data.loader import Batches
from ..methods.result import Adapted
from ..network.accounting import account
from ..network.network import MultiDomainNetwork
from ..stats.decomposition import Decomposition
from ..training.progress import Reporter
from .prediction import probabilities

LARGEST_CONFUSION = 100  # classes; nobody reads a larger table
EXAMPLES = 12
LOADERS = ("train", "val", "statistics", "test")


def held_out(data: Decoded) -> str:
    """Return the split to measure accuracy on: test if there is one, else val, else train."""
    return next(split for split in ("test", "val", "train") if split in data.splits)


def loaders(data: Decoded, preprocessing: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Return the loaders of `LOADERS` as `adapt` takes them; "val" is None without such images.

    If there are test images too, "everything" has the training and validation images together.
    """

    def of(split: str, size: int = 64, shuffle: bool = False) -> Batches | None:
        images = data.splits.get(split)
        return images and Batches(images.x, images.y, preprocessing, size, shuffle)

    train = of("train", batch, shuffle=True)
    found = dict(zip(LOADERS, (train, of("val"), of("train"), of(held_out(data))), strict=True))
    if "val" in data.splits and "test" in data.splits:  # what is measured stays held out
        parts = [data.splits[split] for split in ("train", "val")]
        x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
        found["everything"] = Batches(x, y, preprocessing, batch, shuffle=True)
    return found


def percent(right: Tensor) -> float:
    """Return the share of true values among booleans (n,), in percent."""
    return 100 * int(right.sum()) / len(right)


def confusion(labels: Tensor, answers: Tensor, classes: int) -> list[list[int]] | None:
    """Return counts (classes, classes): one row per true class, one column per answer."""
    if classes > LARGEST_CONFUSION:
        return None
    counts = torch.bincount(labels * classes + answers, minlength=classes * classes)
    table: list[list[int]] = counts.reshape(classes, classes).tolist()
    return table


def examples(
    images: Tensor, labels: Tensor, probabilities: Tensor, classes: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Choose a few images, a third of them mistakes if there are enough.

    Returns a description of each, and {key: PNG}.
    """
    confidence, answers = probabilities.max(1)
    wrong = _spread(answers != labels, EXAMPLES // 3)
    right = _spread(answers == labels, EXAMPLES - len(wrong))
    chosen = {f"{place:03}": i for place, i in enumerate(right + wrong)}
    descriptions = [
        {
            "truth": classes[int(labels[i])],
            "label": classes[int(answers[i])],
            "probability": round(float(confidence[i]), 4),
            "image": key,
        }
        for key, i in chosen.items()
    ]
    return descriptions, {key: png(images[i]) for key, i in chosen.items()}


def finish_(
    net: MultiDomainNetwork,
    run: Adapted,
    data: Decoded,
    val: Batches | None,
    dtype: str,
    earlier: Mapping[str, Any],
    reporter: Reporter,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Round an adapted domain to what its file will hold, and measure it.

    Returns its results, `earlier` ones included, and the images of its examples: {key: PNG}.
    """
    name, split = run.domain, held_out(data)
    run.dtype = run.dtype or dtype
    if run.storage is None:
        run.storage = storage_of(net, name, val)
    round_(net, name, PRECISIONS[run.dtype])
    x, labels, _ = data.splits[split]
    reporter.stage("measure", f"{name} as stored, on {len(labels):,} {split} images")
    predicted = probabilities(net, name, x)
    answers = predicted.argmax(1)
    described, images = examples(x, labels, predicted, data.classes)
    stages = {"compressed": run.tested.get("normalize"), "final": percent(answers == labels)}
    results = {
        **earlier,
        **run.record(),
        "on": split,
        "accuracy": {**earlier["accuracy"], **stages},
        "seconds": {**earlier["seconds"], **run.seconds},
        "confusion": confusion(labels, answers, len(data.classes)),
        "examples": described,
        **sizes(net, name, PRECISIONS[run.dtype]),
    }
    return results, images


def facts_after(
    what: str, settings: dict[str, Any], results: dict[str, Any], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a domain's facts after `what` was done to it: add, join, import or upload.

    Of the `earlier` facts, the source stays and the history gets one more line.
    """
    event = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": what,
        "method": settings["method"],
        "accuracy": results["accuracy"]["final"],
        "stages": results["accuracy"],
        "parameters": results["counted"],
        "bytes": results["bytes"],
    }
    return {
        **earlier,
        "method": settings["method"],
        "settings": settings,
        "results": results,
        "history": [*earlier.get("history", ()), event],
    }


def spectra(parts: Mapping[str, Decomposition]) -> dict[str, dict[str, list[float]]]:
    """Return, by site, eigenvalues of A's input x and output y and singular values of A."""
    return {
        site: {k: [float(f"{v:.5g}") for v in t.tolist()] for k, t in part.spectra.items()}
        for site, part in parts.items()
    }


def sizes(net: MultiDomainNetwork, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return parameters by part, bytes, and the totals that percentages refer to."""
    cost, count = account(net, name), net.num_parameters(name)
    parameters = {part: n for part, n in cost.parameters.items() if n}
    return {
        "parameters": {"adapter": 0, **parameters, "total": count["total"]},
        "counted": count["adapter"],
        "bytes": stored_bytes(net, name, dtype),
        "denominators": cost.denominators,
        "widths": {site: layer.d_out for site, layer in net.sites.items()},
    }


def _spread(chosen: Tensor, k: int) -> list[int]:
    """Return at most k places of the true values, evenly spread."""
    places = chosen.nonzero().flatten().tolist()
    k = min(k, len(places))
    return [places[i * len(places) // k] for i in range(k)]


def png(image: Tensor) -> bytes:
    """Encode a uint8 image (3, h, w) as PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG", optimize=True)
    return file.getvalue()
