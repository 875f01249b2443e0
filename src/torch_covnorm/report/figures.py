"""The report's figures: what is drawn on the canvas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..stats.ranks import explained
from .canvas import (
    WIDTH,
    as_svg,
    by_layer,
    from_one,
    house_style,
    named_rows,
    one_pair,
    whole_steps,
)
from .svg import BLUE, GREEN, INK, LINE, ORANGE, PAGE, SOFT, TRACK, VIOLET

STAGES = {"before": ("o", SOFT), "adapted": ("^", BLUE), "compressed": ("s", ORANGE)}
POINTS = 64  # of a curve, at most


def accuracies(rows: Sequence[tuple[str, Sequence[float | None]]], about: str, key: str) -> str:
    """Accuracy before / adapted / compressed / final by domain: a lane a stage, top to bottom."""
    values = [v for _, stages in rows for v in stages if v is not None]
    low = max(0.0, 10 * np.floor((min(values, default=0.0) - 3) / 10))
    with house_style():
        figure, axes = named_rows(len(rows), (low, 100 + (100 - low) * 0.02), right=14)
        for i, (_, stages) in enumerate(rows):
            lanes = [i - 0.27 + 0.18 * j for j in range(len(stages))]
            known = [(v, lane) for v, lane in zip(stages, lanes, strict=True) if v is not None]
            if not known:
                axes.text(low, i, " not measured", va="center")
            axes.plot(*zip(*known, strict=True) if known else ((), ()), color=LINE, lw=1.2)
            marks = [*STAGES.values(), ("o", GREEN)]
            for v, lane, (marker, color) in zip(stages, lanes, marks, strict=True):
                face = color if color == GREEN else "none"
                if v is not None:
                    axes.plot(v, lane, marker, color=color, mfc=face, ms=5.6, mew=1.5)
        axes.set_xlabel("accuracy, % of the images")
        return as_svg(figure, about, key, [n for n, _ in rows])


def parameters(rows: Sequence[tuple[str, float, bool]], about: str, key: str) -> str:
    """Adapter parameters in percent of RA's, by (name, percent, shared); past 100 % bars break."""
    top = max([100.0, *(min(p, 112.0) for _, p, _ in rows)])
    with house_style():
        figure, axes = named_rows(len(rows), (0, top), right=74)
        for i, (_, percent, shared) in enumerate(rows):
            axes.barh(i, 100, 0.34, color=TRACK)
            color = VIOLET if shared else BLUE
            axes.barh(i, min(percent, top), 0.34, color=color)
            if percent > top:
                slash = np.array([0, 2, 4.5, 2.5]) + 102
                axes.fill(slash, [i + 0.2, i + 0.2, i - 0.2, i - 0.2], color=PAGE, lw=0)
            text = f"{percent:.0f} %" if percent >= 100 else f"{percent:.1f} %"
            axes.text(top * 1.03, i, text, va="center", color=INK)
        axes.set_xlabel("adapter parameters, % of RA's")
        return as_svg(figure, about, key, [n for n, _, _ in rows])


def ranks(d: Sequence[int], kx: Sequence[int], ky: Sequence[int], about: str, key: str) -> str:
    """d, kx and ky by layer, on a scale of powers of two: the gap of kx and ky is log η."""
    layer = np.arange(1, len(d) + 1)
    x, y = np.maximum(kx, 1), np.maximum(ky, 1)
    with house_style():
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
        return as_svg(figure, about, key)


def ratios(eta: Sequence[float | None], about: str, key: str) -> str:
    """η = ky/kx by layer (the paper's "ratio of effective dimensions")."""
    known = [(i, e) for i, e in enumerate(eta, start=1) if e is not None]
    with house_style():
        figure, axes = one_pair(WIDTH, 230, left=40, right=8, top=8, bottom=44)
        axes.axhline(1, color=SOFT, lw=1, ls=(0, (3, 3)))
        axes.bar([i for i, _ in known], [e for _, e in known], 0.62, color=GREEN)
        axes.set_ylim(0, max([1.08, *(1.08 * e for _, e in known)]))
        by_layer(axes, len(eta))
        return as_svg(figure, about, key)


def curve(values: Sequence[float]) -> np.ndarray:
    """r_i for i = 0 … d, in percent: the variance in the first i directions; (d + 1,)."""
    if not values or not max(values) > 0:
        return np.zeros(1)
    return np.concatenate([[0], 100 * explained(torch.tensor(values, dtype=torch.float64)).numpy()])


def spectrum(
    curves: dict[str, np.ndarray], kept: dict[str, int], t: float | None, about: str, key: str
) -> str:
    """Variance explained by the first i directions, of x and y, and of A by its squared singular
    values: the variance that y would have if x were white. Marks: kx, ky. Dashes: t."""
    looks: dict[str, dict[str, Any]] = {
        "A": {"color": VIOLET, "lw": 1.6, "ls": (0, (4, 2.5))},
        "x": {"color": BLUE, "lw": 1.8},
        "y": {"color": ORANGE, "lw": 1.8},
    }
    marks: dict[str, dict[str, Any]] = {
        "x": {"marker": "o", "mfc": "none", "ms": 6, "mew": 1.6},
        "y": {"marker": "s", "ms": 5},
    }
    with house_style():
        figure, axes = one_pair(300, 210, left=40, right=10, top=8, bottom=44)
        if t is not None:
            axes.axhline(100 * t, color=SOFT, lw=1, ls=(0, (1, 2.5)))
        for name, look in looks.items():
            at = _thinned(len(curves[name]), kept.get(name))
            axes.plot(at, curves[name][at], **look)
        for name, mark in marks.items():
            k = kept.get(name)
            if k is not None and 0 <= k < len(curves[name]):
                axes.plot(k, curves[name][k], color=looks[name]["color"], **mark)
        longest = max(2, *(len(c) for c in curves.values())) - 1
        axes.set_xlim(0, longest)
        axes.set_ylim(0, 103)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.set_xticks(whole_steps(longest))
        axes.set_xlabel("directions")
        axes.grid(axis="y", color=LINE, lw=0.8)
        return as_svg(figure, about, key)


def heat_map(shares: np.ndarray, about: str, key: str) -> str:
    """A confusion matrix (n, n), rows summing to 1; the root of a share is the opacity."""
    image = np.empty((*shares.shape, 4))
    image[..., :3] = [0x3B / 255, 0x86 / 255, 0xC8 / 255]
    image[..., 3] = np.sqrt(shares)
    n = len(shares)
    with house_style():
        figure, axes = one_pair(WIDTH, WIDTH - 10, left=46, right=8, top=8, bottom=46)
        place = (0.5, n + 0.5, n + 0.5, 0.5)
        axes.imshow(image, interpolation="none", extent=place, aspect="auto")
        for spine in axes.spines.values():
            spine.set_visible(True)
        axes.set_xticks(from_one(n))
        axes.set_yticks(from_one(n))
        axes.set_xlabel("answer (number of the class)")
        axes.set_ylabel("truth (number of the class)")
        return as_svg(figure, about, key)


def _thinned(n: int, also: int | None) -> np.ndarray:
    """At most about `POINTS` indices below n, dense at the start, where a spectrum bends."""
    if n <= POINTS:
        return np.arange(n)
    some = np.geomspace(1, n - 1, POINTS).round().astype(int)
    return np.unique([0, *some, *([also] if also is not None and 0 <= also < n else [])])
