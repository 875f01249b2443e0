"""The report's figures: matplotlib draws them, what leaves is a small SVG in the page's colours.

One unit is one CSS pixel. Colours become CSS variables, so a figure is light or dark with its page.
Names of domains never go through matplotlib: its fonts lack most scripts and it reads $ as
mathematics; they are set as SVG text in the page's own font.
"""

from __future__ import annotations

import io
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..ranks import explained
from .svg import BLUE, GREEN, INK, LINE, ORANGE, PAGE, SOFT, TRACK, VIOLET, lean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: smaller, searchable, in the page's font
    "svg.hashsalt": "torch-covnorm",
    "font.size": 12,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.labelpad": 7,
    "axes.unicode_minus": True,
    "text.color": SOFT,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "lines.solid_capstyle": "round",
    "path.simplify": False,
}
STAGES = {"before": ("o", SOFT), "adapted": ("^", BLUE), "compressed": ("s", ORANGE)}
WIDTH, NAMES = 460, 132  # of a wide figure, and of the names at its left
ROW = 38
POINTS = 64  # of a curve, at most


def accuracies(rows: Sequence[tuple[str, Sequence[float | None]]], about: str, key: str) -> str:
    """Accuracy before / adapted / compressed / final by domain: a lane a stage, top to bottom."""
    values = [v for _, stages in rows for v in stages if v is not None]
    low = max(0.0, 10 * np.floor((min(values, default=0.0) - 3) / 10))
    with _style():
        figure, axes = _rows(len(rows), (low, 100 + (100 - low) * 0.02), right=14)
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
        return _svg(figure, about, key, [n for n, _ in rows])


def parameters(rows: Sequence[tuple[str, float, bool]], about: str, key: str) -> str:
    """Adapter parameters in percent of RA's, by (name, percent, shared); past 100 % bars break."""
    top = max([100.0, *(min(p, 112.0) for _, p, _ in rows)])
    with _style():
        figure, axes = _rows(len(rows), (0, top), right=74)
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
        return _svg(figure, about, key, [n for n, _, _ in rows])


def ranks(d: Sequence[int], kx: Sequence[int], ky: Sequence[int], about: str, key: str) -> str:
    """d, kx and ky by layer, on a scale of powers of two: the gap of kx and ky is log η."""
    layer = np.arange(1, len(d) + 1)
    x, y = np.maximum(kx, 1), np.maximum(ky, 1)
    with _style():
        figure, axes = _axes(WIDTH, 230, left=40, right=8, top=8, bottom=44)
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
        _layers(axes, len(d))
        return _svg(figure, about, key)


def ratios(eta: Sequence[float | None], about: str, key: str) -> str:
    """η = ky/kx by layer (the paper's "ratio of effective dimensions")."""
    known = [(i, e) for i, e in enumerate(eta, start=1) if e is not None]
    with _style():
        figure, axes = _axes(WIDTH, 230, left=40, right=8, top=8, bottom=44)
        axes.axhline(1, color=SOFT, lw=1, ls=(0, (3, 3)))
        axes.bar([i for i, _ in known], [e for _, e in known], 0.62, color=GREEN)
        axes.set_ylim(0, max([1.08, *(1.08 * e for _, e in known)]))
        _layers(axes, len(eta))
        return _svg(figure, about, key)


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
    with _style():
        figure, axes = _axes(300, 210, left=40, right=10, top=8, bottom=44)
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
        axes.set_xticks(_whole_steps(longest))
        axes.set_xlabel("directions")
        axes.grid(axis="y", color=LINE, lw=0.8)
        return _svg(figure, about, key)


def heat_map(shares: np.ndarray, about: str, key: str) -> str:
    """A confusion matrix (n, n), rows summing to 1; the root of a share is the opacity."""
    image = np.empty((*shares.shape, 4))
    image[..., :3] = [0x3B / 255, 0x86 / 255, 0xC8 / 255]
    image[..., 3] = np.sqrt(shares)
    n = len(shares)
    with _style():
        figure, axes = _axes(WIDTH, WIDTH - 10, left=46, right=8, top=8, bottom=46)
        place = (0.5, n + 0.5, n + 0.5, 0.5)
        axes.imshow(image, interpolation="none", extent=place, aspect="auto")
        for spine in axes.spines.values():
            spine.set_visible(True)
        axes.set_xticks(_from_one(n))
        axes.set_yticks(_from_one(n))
        axes.set_xlabel("answer (number of the class)")
        axes.set_ylabel("truth (number of the class)")
        return _svg(figure, about, key)


# ── drawing ──────────────────────────────────────────────────────────────────────────────────


class _style:
    """The same look whatever the user's matplotlibrc says, and theirs again behind it."""

    def __enter__(self) -> None:
        import matplotlib

        self.context = matplotlib.rc_context()
        self.context.__enter__()
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def _axes(
    width: float, height: float, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """A figure of that many pixels with one frameless pair of axes; no clipping, no tick marks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    place = (
        left / width,
        bottom / height,
        (width - left - right) / width,
        (height - top - bottom) / height,
    )
    axes = figure.add_axes(place)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(left=False, bottom=False, which="both", pad=6)
    axes.set_axisbelow(True)
    return figure, axes


def _rows(n: int, x: tuple[float, float], right: float) -> tuple[Figure, Axes]:
    """Axes with a row a name, the first at the top, and room for the names at the left."""
    figure, axes = _axes(WIDTH, ROW * n + 50, left=NAMES, right=right, top=2, bottom=48)
    axes.set_ylim(n - 0.5, -0.5)
    axes.set_xlim(*x)
    axes.set_yticks([])
    axes.set_xticks([v for v in range(0, 101, 10 if 100 - x[0] < 60 else 20) if v >= x[0]])
    axes.grid(axis="x", color=LINE, lw=0.8)
    return figure, axes


def _layers(axes: Axes, n: int) -> None:
    axes.set_xlim(0.3, n + 0.7)
    axes.set_xticks(_from_one(n))
    axes.set_xlabel("layer, in network order")
    axes.grid(axis="y", color=LINE, lw=0.8)


def _whole_steps(n: int) -> list[int]:
    """0 … n in at most six whole steps of 1, 2 or 5 times a power of ten."""
    step = next(m * 10**p for p in range(9) for m in (1, 2, 5) if m * 10**p * 6 >= n)
    return list(range(0, n + 1, step))


def _from_one(n: int) -> list[int]:
    """1 and the whole steps behind it."""
    return [1, *(v for v in _whole_steps(n) if v > 1)]


def _thinned(n: int, also: int | None) -> np.ndarray:
    """At most about `POINTS` indices below n, dense at the start, where a spectrum bends."""
    if n <= POINTS:
        return np.arange(n)
    some = np.geomspace(1, n - 1, POINTS).round().astype(int)
    return np.unique([0, *some, *([also] if also is not None and 0 <= also < n else [])])


def _svg(figure: Figure, about: str, key: str, names: Sequence[str] = ()) -> str:
    """The figure as text, with a name at the left of every row."""
    for axes in figure.axes:
        for artist in axes.get_children():
            artist.set_clip_on(False)
    stream = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    svg = lean(stream.getvalue(), about, key)
    for i, name in enumerate(names):
        y = f"{2 + ROW * (i + 0.5) + 4:g}"
        text = ET.SubElement(svg, "text", {"class": "name", "x": str(NAMES - 12), "y": y})
        text.text = shortened(name, 17)
    return ET.tostring(svg, encoding="unicode")


def shortened(text: str, columns: int) -> str:
    """The text, or its start and …, within that many columns; wide characters take two."""
    used = 0
    for i, character in enumerate(text):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > columns:
            return text[: max(i - 1, 1)] + "…"
    return text
