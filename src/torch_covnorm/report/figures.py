"""The report's figures as SVG text: `label` is for screen readers, ids begin with `key`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..stats.ranks import explained
from .canvas import WIDTH, as_svg, by_layer, house_style, named_rows, one_pair, ticks
from .svg import BLUE, GREEN, INK, LINE, ORANGE, PAGE, SOFT, TRACK, VIOLET

# Marker, color and fill of the stages: before, adapted, compressed, final.
STAGES = (("o", SOFT, "none"), ("^", BLUE, "none"), ("s", ORANGE, "none"), ("o", GREEN, GREEN))
POINTS = 64  # of a curve, at most


@house_style()
def accuracies(rows: Sequence[tuple[str, Sequence[float | None]]], label: str, key: str) -> str:
    """Draw (name, accuracy by stage) of every domain; the stages follow from top to bottom."""
    values = [v for _, stages in rows for v in stages if v is not None]
    low = max(0.0, 10 * np.floor((min(values, default=0.0) - 3) / 10))
    figure, axes = named_rows(len(rows), (low, 100 + (100 - low) * 0.02), right=14)
    for i, (_, stages) in enumerate(rows):
        lanes = [i - 0.27 + 0.18 * j for j in range(len(stages))]
        places = {lane: v for v, lane in zip(stages, lanes, strict=True) if v is not None}
        if not places:
            axes.text(low, i, " not measured", va="center")
        axes.plot(list(places.values()), list(places), color=LINE, lw=1.2)
        for lane, (marker, color, fill) in zip(lanes, STAGES, strict=True):
            if lane in places:
                axes.plot(places[lane], lane, marker, color=color, mfc=fill, ms=5.6, mew=1.5)
    axes.set_xlabel("accuracy, % of the images")
    return as_svg(figure, label, key, [name for name, _ in rows])


@house_style()
def parameters(rows: Sequence[tuple[str, float, bool]], label: str, key: str) -> str:
    """Draw (name, adapter parameters in percent of RA's, shared); bars break past 100 %."""
    top = max([100.0, *(min(p, 112.0) for _, p, _ in rows)])
    figure, axes = named_rows(len(rows), (0, top), right=74)
    for i, (_, percent, shared) in enumerate(rows):
        axes.barh(i, 100, 0.34, color=TRACK)
        axes.barh(i, min(percent, top), 0.34, color=VIOLET if shared else BLUE)
        if percent > top:
            slash = np.array([0, 2, 4.5, 2.5]) + 102
            axes.fill(slash, [i + 0.2, i + 0.2, i - 0.2, i - 0.2], color=PAGE, lw=0)
        text = f"{percent:.0f} %" if percent >= 100 else f"{percent:.1f} %"
        axes.text(top * 1.03, i, text, va="center", color=INK)
    axes.set_xlabel("adapter parameters, % of RA's")
    return as_svg(figure, label, key, [name for name, _, _ in rows])


@house_style()
def ranks(d: Sequence[int], kx: Sequence[int], ky: Sequence[int], label: str, key: str) -> str:
    """Draw d, kx and ky by layer on a log2 scale: the gap between kx and ky is log η."""
    layer = np.arange(1, len(d) + 1)
    x, y = np.maximum(kx, 1), np.maximum(ky, 1)
    figure, axes = one_pair(WIDTH, 230, left=40, right=8, top=8, bottom=44)
    axes.set_yscale("log", base=2)
    axes.vlines(layer, np.minimum(x, y), d, color=LINE, lw=1.2)
    axes.plot(layer, d, "_", color=SOFT, ms=9, mew=1.5)
    axes.plot(layer, x, "o", color=BLUE, mfc="none", ms=5.6, mew=1.5)
    axes.plot(layer, y, "s", color=ORANGE, ms=4.6, mew=1.2)
    high = int(np.ceil(np.log2(max(*d, *kx, *ky, 2))))
    powers = [2**p for p in range(0, high + 1, 1 if high < 7 else 2)]
    axes.set_yticks(powers, [str(p) for p in powers])
    axes.set_yticks([], minor=True)
    axes.set_ylim(0.9, 2.0**high * 1.1)
    by_layer(axes, len(d))
    return as_svg(figure, label, key)


@house_style()
def ratios(eta: Sequence[float | None], label: str, key: str) -> str:
    """Draw η = ky/kx by layer (the paper's "ratio of effective dimensions")."""
    known = {i: e for i, e in enumerate(eta, start=1) if e is not None}
    figure, axes = one_pair(WIDTH, 230, left=40, right=8, top=8, bottom=44)
    axes.axhline(1, color=SOFT, lw=1, ls=(0, (3, 3)))
    axes.bar(list(known), list(known.values()), 0.62, color=GREEN)
    axes.set_ylim(0, 1.08 * max([1, *known.values()]))
    by_layer(axes, len(eta))
    return as_svg(figure, label, key)


def curve(values: Sequence[float]) -> np.ndarray:
    """Return r_i for i = 0 … d, the variance in the first i directions in percent: (d + 1,)."""
    if not values or not max(values) > 0:
        return np.zeros(1)
    return np.concatenate([[0], 100 * explained(torch.tensor(values, dtype=torch.float64)).numpy()])


@house_style()
def spectrum(
    curves: Mapping[str, np.ndarray], kept: Mapping[str, int], t: float, label: str, key: str
) -> str:
    """Draw the variance explained by the first i directions, for x, y and A.

    A's curve has its squared singular values: the variances of y if x were white. Marks show the
    ranks `kept` (kx, ky), dashes the threshold t.
    """
    figure, axes = one_pair(300, 210, left=40, right=10, top=8, bottom=44)
    axes.axhline(100 * t, color=SOFT, lw=1, ls=(0, (1, 2.5)))
    lines = (("A", VIOLET, 1.6, (0, (4, 2.5))), ("x", BLUE, 1.8, "-"), ("y", ORANGE, 1.8, "-"))
    for name, color, width, dashes in lines:
        at = _thinned(len(curves[name]), kept.get(name))
        axes.plot(at, curves[name][at], color=color, lw=width, ls=dashes)
    if 0 <= (k := kept.get("x", -1)) < len(curves["x"]):
        axes.plot(k, curves["x"][k], "o", color=BLUE, mfc="none", ms=6, mew=1.6)
    if 0 <= (k := kept.get("y", -1)) < len(curves["y"]):
        axes.plot(k, curves["y"][k], "s", color=ORANGE, ms=5)
    longest = max(2, *(len(c) for c in curves.values())) - 1
    axes.set_xlim(0, longest)
    axes.set_ylim(0, 103)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xticks(ticks(longest))
    axes.set_xlabel("directions")
    axes.grid(axis="y", color=LINE, lw=0.8)
    return as_svg(figure, label, key)


@house_style()
def heat_map(shares: np.ndarray, label: str, key: str) -> str:
    """Draw a confusion matrix (n, n) whose rows sum to 1; the opacity is the root of a share."""
    n = len(shares)
    image = np.empty((n, n, 4))
    image[..., :3] = [0x3B / 255, 0x86 / 255, 0xC8 / 255]
    image[..., 3] = np.sqrt(shares)
    figure, axes = one_pair(WIDTH, WIDTH - 10, left=46, right=8, top=8, bottom=46)
    extent = (0.5, n + 0.5, n + 0.5, 0.5)
    axes.imshow(image, interpolation="none", extent=extent, aspect="auto")
    axes.spines[:].set_visible(True)
    axes.set_xticks(ticks(n, first=1))
    axes.set_yticks(ticks(n, first=1))
    axes.set_xlabel("answer (class number)")
    axes.set_ylabel("truth (class number)")
    return as_svg(figure, label, key)


def _thinned(n: int, also: int | None) -> np.ndarray:
    """Return about `POINTS` indices below n, dense at the start, where a spectrum bends."""
    if n <= POINTS:
        return np.arange(n)
    some = np.geomspace(1, n - 1, POINTS).round().astype(int)
    return np.unique([0, *some, *([also] if also is not None and 0 <= also < n else [])])
