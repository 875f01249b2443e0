"""What the store keeps of a domain's results: accuracy, confusion, examples, spectra, sizes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compress.precision import stored_bytes
from ..data.decode import Decoded, Images
from ..network.accounting import account
from ..network.network import MultiDomainNetwork
from ..stats.decomposition import Decomposition
from .prediction import probabilities

LARGEST_CONFUSION = 100  # classes; nobody reads a larger table
EXAMPLES = 12


def held_out(data: Decoded) -> str:
    """Return the split to measure accuracy on: test if there is one, else val, else train."""
    return next(split for split in ("test", "val", "train") if split in data.splits)


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
    wrong = _spread((answers != labels).nonzero().flatten().tolist(), EXAMPLES // 3)
    right = _spread((answers == labels).nonzero().flatten().tolist(), EXAMPLES - len(wrong))
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


def predictions(
    net: MultiDomainNetwork, name: str, part: Images, classes: Sequence[str]
) -> tuple[dict[str, Any], dict[str, bytes], float]:
    """Measure a domain on labelled images.

    Returns "confusion" and "examples" for its results, the examples' images {key: PNG}, and the
    accuracy in percent.
    """
    found = probabilities(net, name, part.x)
    answers = found.argmax(1)
    said, images = examples(part.x, part.y, found, classes)
    table = confusion(part.y, answers, len(classes))
    return {"confusion": table, "examples": said}, images, percent(answers == part.y)


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


def _spread(places: list[int], k: int) -> list[int]:
    """Return at most k of the places, evenly spread."""
    k = min(k, len(places))
    return [places[i * len(places) // k] for i in range(k)]


def png(image: Tensor) -> bytes:
    """Encode a uint8 image (3, h, w) as PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG", optimize=True)
    return file.getvalue()
