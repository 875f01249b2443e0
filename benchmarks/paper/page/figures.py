"""The figures, drawn like the report's: a small SVG in the page's colours, its legend inside."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torch_covnorm.report.canvas import WIDTH, as_svg, by_layer, house_style, named_rows, one_pair
from torch_covnorm.report.svg import BLUE, GREEN, INK, LINE, ORANGE, SOFT, VIOLET

from .drawing import apart, bars, by_share, legend, limits

DASHED, DOTTED = (0, (4, 2.5)), (0, (1, 2.5))
LOOKS: dict[str, dict[str, Any]] = {
    "covnorm": {"color": BLUE, "marker": "o"},
    "svd-fta": {"color": ORANGE, "marker": "s"},
    "fta": {"color": GREEN, "marker": "^"},
    "pca-fta": {"color": VIOLET, "marker": "D"},
    "loss": {"color": BLUE, "marker": "o"},
    "loss-train": {"color": BLUE, "marker": "x"},
    "variance": {"color": ORANGE, "marker": "s"},
    "threshold": {"color": VIOLET, "marker": "D"},
    "svd": {"color": SOFT, "marker": "v"},
    "svd-greedy": {"color": GREEN, "marker": "^"},
    "svd-loss-ranks": {"color": GREEN, "marker": "P"},
    "svd-scaled": {"color": SOFT, "marker": "X"},
}
BOUNDS = {"ra": "-", "fnft": DASHED, "bn": DOTTED}
Point = tuple[float, Sequence[float]]  # x, and a y of every seed; the line is of the first


def means(rows: Sequence[tuple[str, Sequence[float], float | None]], about: str, key: str) -> str:
    """Ours of every seed's mean and the published one, by method."""
    known = [v for _, ours, other in rows for v in [*ours, *([other] if other else [])]]
    low = 10 * np.floor((min(known, default=0.0) - 3) / 10)
    with house_style():
        figure, axes = named_rows(len(rows), (low, 100), right=14)
        for i, (_, ours, other) in enumerate(rows):
            if other is not None:
                axes.plot(other, i, "D", color=SOFT, mfc="none", ms=5.6, mew=1.3)
            if ours:
                axes.plot([min(ours), max(ours)], [i, i], color=BLUE, lw=1.6)
                axes.plot(statistics.fmean(ours), i, "o", color=BLUE, ms=6)
        axes.set_xlabel("mean test accuracy, %")
        return as_svg(figure, about, key, [name for name, _, _ in rows])


def parameters(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    bounds: Mapping[str, float],
    names: Mapping[str, str],
    about: str,
    key: str,
) -> str:
    """Accuracy against adapter parameters in percent of RA's, one domain."""
    with house_style():
        figure, axes = one_pair(WIDTH, 372, left=56, right=50, top=86, bottom=48)
        values = list(bounds.values())
        for name, points in lines.items():
            x, y = [p for p, _ in points], [v[0] for _, v in points]
            values += [v for _, many in points for v in many]
            axes.plot(x, y, color=LOOKS[name]["color"], lw=1.6)
            axes.plot(x, y, LOOKS[name]["marker"], color=LOOKS[name]["color"], ms=5.4)
            for place, many in points:
                if len(many) > 1:
                    bars(axes, place, min(many), max(many), LOOKS[name]["color"])
        by_share(axes, [p for points in lines.values() for p, _ in points])
        limits(axes, values)
        for name, value in bounds.items():
            axes.axhline(value, color=INK, lw=1, ls=BOUNDS[name], zorder=1)
        for name, y in apart(bounds, axes, 16, 372 - 86 - 48).items():
            axes.text(1.02, y, names[name], transform=axes.get_yaxis_transform(), va="center")
        axes.set_ylabel("test accuracy, %")
        entries = [(names[n], LOOKS[n], "-") for n in lines]
        legend(axes, title, entries, columns=2, height=238)
        return as_svg(figure, about, key)


def metrics(
    title: str,
    lines: Mapping[tuple[str, bool], Sequence[tuple[float, float, float | None]]],
    ra: float | None,
    names: Mapping[str, str],
    about: str,
    key: str,
) -> str:
    """Mean accuracy ± standard error against the share of RA's parameters, for every way."""
    ways = list(dict.fromkeys(way for way, _ in lines))
    with house_style():
        top = 46 + 20 * -(-(len(ways) + 2) // 2)
        height = 300 + top
        figure, axes = one_pair(WIDTH, height, left=56, right=34, top=top, bottom=48)
        values = [] if ra is None else [ra]
        for (way, tuned), points in lines.items():
            # Side by side, or the bars of one share hide each other.
            aside = 1 + 0.035 * (ways.index(way) - (len(ways) - 1) / 2)
            x, y = [p * aside for p, _, _ in points], [v for _, v, _ in points]
            look = LOOKS.get(way, {"color": SOFT, "marker": "o"})
            values += [v + s * (e or 0) for _, v, e in points for s in (-1, 1)]
            axes.plot(x, y, color=look["color"], lw=1.5, ls="-" if tuned else DASHED)
            face = look["color"] if tuned else "none"
            axes.plot(x, y, look["marker"], color=look["color"], mfc=face, ms=5.4, mew=1.3)
            for place, (_, value, off) in zip(x, points, strict=True):
                if off:
                    bars(axes, place, value - off, value + off, look["color"])
        by_share(axes, [p for points in lines.values() for p, _, _ in points])
        limits(axes, values)
        if ra is not None:
            axes.axhline(ra, color=INK, lw=1, zorder=1)
            axes.text(1.02, ra, "A", transform=axes.get_yaxis_transform(), va="center")
        axes.set_ylabel("mean test accuracy, %")
        entries = [
            (names.get(w, w), LOOKS.get(w, {"color": SOFT, "marker": "o"}), "-") for w in ways
        ]
        entries += [("", {"color": INK, "marker": ""}, "")] * (len(ways) % 2)
        entries += [("tuned", {"color": INK, "marker": ""}, "-")]
        entries += [("not tuned", {"color": INK, "marker": ""}, DASHED)]
        legend(axes, title, entries, columns=2, height=height - top - 48)
        return as_svg(figure, about, key)


def eta(of: Mapping[str, np.ndarray], about: str, key: str) -> str:
    """η = ky/kx by layer for each threshold (domains, layers): the mean, and all domains' range."""
    colors = (GREEN, ORANGE, BLUE, VIOLET)
    with house_style():
        figure, axes = one_pair(WIDTH, 300, left=56, right=8, top=44, bottom=48)
        axes.axhline(1, color=SOFT, lw=1, ls=(0, (3, 3)))
        entries, layers = [], 1
        for i, (t, ratios) in enumerate(of.items()):
            layers, marker = ratios.shape[1], "os^D"[i]
            x = np.arange(1, layers + 1) + 0.16 * (i - (len(of) - 1) / 2)
            axes.plot(x, ratios.mean(0), color=colors[i], lw=1.5)
            axes.plot(x, ratios.mean(0), marker, color=colors[i], ms=5)
            for place, column in zip(x, ratios.T, strict=True):
                axes.plot([place] * 2, [column.min(), column.max()], color=colors[i], lw=1)
            entries.append((f"t = {t}", {"color": colors[i], "marker": marker}, "-"))
        axes.set_ylim(0, max(1.08, *(1.05 * r.max() for r in of.values())))
        by_layer(axes, layers)
        axes.set_ylabel("η = ky / kx")
        legend(axes, "", entries, columns=3, height=208)
        return as_svg(figure, about, key)


def explained(curves: Mapping[str, np.ndarray], title: str, about: str, key: str) -> str:
    """Variance explained by a share of the directions: x, y, and A's squared singular values."""
    looks = {"x": (BLUE, "-"), "y": (ORANGE, "-"), "A": (VIOLET, DASHED)}
    with house_style():
        figure, axes = one_pair(300, 264, left=56, right=14, top=58, bottom=48)
        for name, (color, style) in looks.items():
            values = 100 * curves[name]
            x = 100 * np.arange(1, len(values) + 1) / len(values)
            axes.plot(x, values, color=color, lw=1.8, ls=style)
        axes.set_xscale("log")
        axes.set_xlim(100 / max(len(v) for v in curves.values()), 100)
        axes.set_ylim(0, 103)
        axes.set_yticks([0, 25, 50, 75, 100])
        ticks = [2, 5, 10, 20, 50, 100]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(axis="y", color=LINE, lw=0.8)
        axes.set_xlabel("directions, %")
        axes.set_ylabel("variance explained, %")
        entries = [(n, {"color": c, "marker": ""}, s) for n, (c, s) in looks.items()]
        legend(axes, title, entries, columns=3, height=158)
        return as_svg(figure, about, key)
