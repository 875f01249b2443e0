"""What a figure is drawn on: by matplotlib, and what leaves is a small SVG in the page's colours.

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

from .svg import LINE, SOFT, lean

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
WIDTH, NAMES = 460, 132  # of a wide figure, and of the names at its left
ROW = 38


class house_style:
    """The same look whatever the user's matplotlibrc says, and theirs again behind it."""

    def __enter__(self) -> None:
        import matplotlib

        self.context = matplotlib.rc_context()
        self.context.__enter__()
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def one_pair(
    width: float, height: float, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """A figure of that many pixels with one frameless pair of axes, without tick marks."""
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


def named_rows(n: int, x: tuple[float, float], right: float) -> tuple[Figure, Axes]:
    """Axes with a row a name, the first at the top, and room for the names at the left."""
    figure, axes = one_pair(WIDTH, ROW * n + 50, left=NAMES, right=right, top=2, bottom=48)
    axes.set_ylim(n - 0.5, -0.5)
    axes.set_xlim(*x)
    axes.set_yticks([])
    axes.set_xticks([v for v in range(0, 101, 10 if 100 - x[0] < 60 else 20) if v >= x[0]])
    axes.grid(axis="x", color=LINE, lw=0.8)
    return figure, axes


def by_layer(axes: Axes, n: int) -> None:
    """The x axis of n layers."""
    axes.set_xlim(0.3, n + 0.7)
    axes.set_xticks(from_one(n))
    axes.set_xlabel("layer, in network order")
    axes.grid(axis="y", color=LINE, lw=0.8)


def whole_steps(n: int) -> list[int]:
    """0 … n in at most six whole steps of 1, 2 or 5 times a power of ten."""
    step = next(m * 10**p for p in range(9) for m in (1, 2, 5) if m * 10**p * 6 >= n)
    return list(range(0, n + 1, step))


def from_one(n: int) -> list[int]:
    """1 and the whole steps behind it."""
    return [1, *(v for v in whole_steps(n) if v > 1)]


def as_svg(figure: Figure, about: str, key: str, names: Sequence[str] = ()) -> str:
    """The figure as text, with a name at the left of every row."""
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
