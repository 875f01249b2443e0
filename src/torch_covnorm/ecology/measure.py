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

LARGEST_CONFUSION = 100  # classes; a larger table is no longer read by anybody
EXAMPLES = 12


def held_out(data: Decoded) -> str:
    """The split that accuracies are of: the test part, where there is one."""
    return next(split for split in ("test", "val", "train") if split in data.splits)


def percent(right: Tensor) -> float:
    """Of booleans (n,), how many are true."""
    return 100 * int(right.sum()) / len(right)


def confusion(labels: Tensor, answers: Tensor, classes: int) -> list[list[int]] | None:
    """Counts (classes, classes): rows are the truth, columns the answers."""
    if classes > LARGEST_CONFUSION:
        return None
    counts = torch.bincount(labels * classes + answers, minlength=classes * classes)
    table: list[list[int]] = counts.reshape(classes, classes).tolist()
    return table


def examples(
    images: Tensor, labels: Tensor, probabilities: Tensor, classes: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """A few images with their answers, every third one a mistake where there are enough.

    Returns what is said of each, and {key: PNG}.
    """
    sure, answers = probabilities.max(1)
    wrong = (answers != labels).nonzero().flatten().tolist()
    right = (answers == labels).nonzero().flatten().tolist()
    picked = sorted(_spread(wrong, EXAMPLES // 3)) or []
    picked = _spread(right, EXAMPLES - len(picked)) + picked
    said, files = [], {}
    for place, i in enumerate(picked):
        key = f"{place:03}"
        said.append(
            {
                "truth": classes[int(labels[i])],
                "label": classes[int(answers[i])],
                "probability": round(float(sure[i]), 4),
                "image": key,
            }
        )
        files[key] = png(images[i])
    return said, files


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
    """Parameters by kind, bytes, and what they are shares of."""
    found = account(net, name)
    parameters = {k: v for k, v in found.parameters.items() if v}
    return {
        "parameters": {"adapter": 0, **parameters, "total": net.num_parameters(name)["total"]},
        "counted": net.num_parameters(name)["adapter"],
        "bytes": stored_bytes(net, name, dtype),
        "denominators": found.denominators,
        "widths": {s: site.d_out for s, site in net.sites.items()},
    }


def _spread(places: list[int], k: int) -> list[int]:
    """k of them, evenly spread."""
    k = min(k, len(places))
    return [places[i * len(places) // k] for i in range(k)]


def png(image: Tensor) -> bytes:
    """An image (3, h, w) as a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG", optimize=True)
    return file.getvalue()
