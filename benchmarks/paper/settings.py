"""Training settings of all cells: image sizes, epochs, and learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch_covnorm as cn

PIXELS = {"vgg16": 32, "efficientnet-lite0": 64, "resnet26": 32}
BATCH, EPOCHS, TUNING = 32, 6, 3  # epochs of the A that others start from, and of tuning
WHOLE = (
    EPOCHS + TUNING
)  # epochs of methods that start from nothing, so all see the images equally often
LONGER = 12  # epochs that RA should not need

# The rates that validated best: ``python -m benchmarks.paper rates``. Methods that start from a
# trained A are tuned at this rate; "cut-…" are the cuts of `metric`. The default is USUAL[1].
RATES: Mapping[str, Mapping[str, float]] = {
    "vgg16": {
        **{"fnft": 1e-4, "bn": 3e-2, "parallel": 3e-3, "pca-fta": 3e-3, "piggyback": 3e-4},
        **{"covnorm": 3e-4, "covnorm-identity": 1e-2, "covnorm-random": 3e-3},
        **{"covnorm-small": 3e-3, "covnorm-identity-small": 3e-2, "covnorm-random-small": 1e-2},
        **{"svd-fta-small": 1e-3, "fta-small": 3e-3, "pca-fta-small": 3e-3},
        **{"cut-variance": 1e-3, "cut-loss": 3e-4},
    },
    "efficientnet-lite0": {"ra": 3e-3, "covnorm": 3e-4, "cut-variance": 1e-3, "cut-loss": 3e-4},
    "resnet26": {"ra": 1e-2, "dan": 3e-3, "covnorm": 3e-3},
}
LIKE = {
    "covnorm-joint": "covnorm",
    "joint-svd": "svd-fta",
    "lwf": "fnft",
}  # which uses the rate of which
USUAL = (3e-4, 1e-3, 3e-3)
SMALL, SMALL_VARIANCE, SMALL_RANK = "-small", 0.95, 1 / 16  # small: up to this threshold or ratio
# More rates are tried if the best of the usual three is at the end of the range. FNFT and Piggyback
# change weights that are already trained, so their rates are lower.
GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "vgg16": {
        "fnft": (3e-5, 1e-4, 3e-4, 1e-3),
        "piggyback": (1e-4, 3e-4, 1e-3),
        "bn": (*USUAL, 1e-2, 3e-2, 1e-1),
        "covnorm": (1e-4, *USUAL),
        **dict.fromkeys(("parallel", "pca-fta", "covnorm-random"), (*USUAL, 1e-2)),
        **dict.fromkeys(("covnorm-small", "fta-small", "pca-fta-small"), (*USUAL, 1e-2)),
        **dict.fromkeys(("covnorm-identity", "covnorm-random-small"), (*USUAL, 1e-2, 3e-2)),
        "covnorm-identity-small": (*USUAL, 1e-2, 3e-2, 1e-1),
    },
    "efficientnet-lite0": {"ra": (*USUAL, 1e-2)},
    "resnet26": {
        **dict.fromkeys(("fnft", "piggyback"), (1e-4, *USUAL)),
        **dict.fromkeys(("dan", "covnorm"), (*USUAL, 1e-2)),
        "ra": (*USUAL, 1e-2, 3e-2),
    },
}


def kind(method: str, options: Mapping[str, Any]) -> str:
    """Return what has its own rate: a method, its start of M, and whether it is small."""
    name = f"{method}-{options['M']}" if "M" in options else method
    ratio, t = options.get("rank", options.get("ratio", 1)), options.get("variance", 1)
    return name + SMALL if ratio <= SMALL_RANK or t <= SMALL_VARIANCE else name


def rate(backbone: str, kind: str) -> float:
    """Return the learning rate of a kind; an unsearched small one has that of the usual size."""
    method = kind.removesuffix(SMALL)
    like, known = LIKE.get(method, method), RATES[backbone]
    usual = known.get(like, USUAL[1])
    return usual if kind == method else known.get(like + SMALL, usual)


def rates(backbone: str, kind: str) -> tuple[float, ...]:
    """Return the rates to try."""
    return GRIDS[backbone].get(kind, USUAL)


def published(method: str) -> dict[str, Any]:
    """Return the settings of `cn.adapt` as in the literature: nothing is chosen from the data.

    Every domain has a copy of all norms.
    """
    return {"training": "default", "norms": "own", **cn.METHODS[method].training}
