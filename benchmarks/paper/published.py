"""The paper's methods, accuracies and conclusions. Its data differ: compare the order only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..originals import NAMES as DATASETS

__all__ = ["DATASETS", "NAMES", "PAIRS", "TABLE1"]

# {method: (accuracies in the order of DATASETS, their mean, parameters in % of the network)}
TABLE1: dict[str, tuple[tuple[float, ...], float, float]] = {
    "fnft": ((85.73, 71.77, 95.67, 83.73, 96.41, 57.29, 80.45), 81.58, 100),
    "bn": ((43.6, 57.6, 83.07, 73.66, 91.1, 47.04, 64.8), 65.83, 0),
    "lwf": ((66.25, 73.43, 89.12, 80.02, 44.13, 52.85, 72.94), 68.39, 0),
    "ra": ((88.92, 72.4, 96.43, 84.17, 96.13, 57.38, 79.55), 82.16, 10),
    "svd-fta": ((89.07, 71.66, 95.67, 84.46, 96.04, 57.12, 78.28), 81.75, 5),
    "fta": ((87.31, 70.26, 95.43, 83.82, 95.96, 56.43, 78.23), 81.06, 5),
    "covnorm": ((88.98, 72.51, 96.76, 84.75, 96.23, 57.97, 79.42), 82.37, 0.53),
    "joint-svd": ((88.98, 71.7, 96.37, 83.63, 96.0, 56.58, 78.26), 81.65, 5),
    "covnorm-joint": ((88.99, 73.0, 96.69, 84.77, 96.22, 58.2, 79.22), 82.44, 0.51),
}

# (above, below): what the paper concludes from its Table 1.
PAIRS = (
    ("covnorm", "ra"),
    ("covnorm", "svd-fta"),
    ("covnorm", "fta"),
    ("covnorm-joint", "covnorm"),
    ("covnorm-joint", "joint-svd"),
    ("svd-fta", "fta"),
    ("ra", "fnft"),
    ("ra", "bn"),
)

# {method: its name in tables}, in the order of tables; the starts of M are ours.
NAMES = {
    "fnft": "FNFT",
    "bn": "BN",
    "lwf": "LwF",
    "ra": "RA",
    "parallel": "parallel RA",
    "dan": "DAN",
    "svd": "SVD",
    "svd-fta": "SVD+FTA",
    "fta": "FTA",
    "pca-fta": "PCA+FTA",
    "piggyback": "Piggyback",
    "covnorm": "CovNorm",
    "covnorm-identity": "CovNorm from the identity as M",
    "covnorm-random": "CovNorm from a random M",
    "joint-svd": "joint SVD",
    "covnorm-joint": "joint CovNorm",
}


def accuracy_of(method: str, domains: Sequence[str]) -> dict[str, float | None]:
    """Return a method's published accuracies on these datasets, and their mean.

    On domains that the paper does not have, return only its mean over its own.
    """
    if method not in TABLE1:
        return {"mean": None}
    if not {*domains} <= {*DATASETS}:
        return {"mean": TABLE1[method][1]}
    by_dataset = dict(zip(DATASETS, TABLE1[method][0], strict=True))
    return by_dataset | {"mean": statistics.fmean(by_dataset[d] for d in domains)}
