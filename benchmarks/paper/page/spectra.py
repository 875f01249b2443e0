"""Effective dimensions and variance explained, from the rows of the trained A's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .rows import Row, Rows

KEY = {"backbone": "vgg16", "method": "spectra"}


def ratios(found: Rows, t: str) -> np.ndarray:
    """η = ky/kx at a threshold, (domains, layers) in network order."""
    rows = measured(found)
    return np.array([[ky / max(kx, 1) for kx, ky in r["ranks"][t].values()] for r in rows])


def curves(found: Rows, site: str) -> Mapping[str, np.ndarray]:
    """Variance explained, mean over domains, of x, y and A at a site."""
    rows = measured(found)
    return {k: np.mean([r["explained"][site][k] for r in rows], axis=0) for k in ("x", "y", "A")}


def needed(found: Rows, site: str, t: float = 0.99) -> Mapping[str, float]:
    """The share of its directions that x, y and A take for a share t of the variance."""
    of = curves(found, site)
    return {k: (1 + int(np.argmax(curve >= t))) / len(curve) for k, curve in of.items()}


def sites(found: Rows) -> Sequence[str]:
    """Of the network, in its order; none before anything was measured."""
    rows = measured(found)
    return list(rows[0]["explained"]) if rows else []


def measured(found: Rows) -> list[Row]:
    return list(found.of(KEY).values())


def whole(found: Rows) -> bool:
    """Whether every domain was measured."""
    return {row["domain"] for row in measured(found)} == {*found.domains}
