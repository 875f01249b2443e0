"""Axes for the report's figures: drawn by matplotlib, written as a small SVG.

One unit is one CSS pixel. Colors become CSS variables, so a figure is light or dark with its page.
Names of domains bypass matplotlib, because its fonts lack most scripts and it reads $ as
mathematics. They are SVG text in the page's own font.
"""

from __future__ import annotations

import contextlib
import io
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .svg import LINE, SOFT, lean
from .wording import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: smaller, searchable, in the page's font
    "font.size": 12,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.labelpad": 7,
    "text.color": SOFT,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "path.simplify": False,
}
WIDTH, NAMES = 460, 132  # of a wide figure, and of the names on its left
ROW = 38


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Draw in one style whatever the user's matplotlibrc says; also a decorator."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def one_pair(
    width: float, height: float, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """Return a figure of that many pixels with one pair of axes, without frame or tick marks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    x, w = left / width, (width - left - right) / width
    y, h = bottom / height, (height - top - bottom) / height
    axes = figure.add_axes((x, y, w, h))
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False, which="both", pad=6)
    axes.set_axisbelow(True)
    return figure, axes


def named_rows(n: int, x: tuple[float, float], right: float) -> tuple[Figure, Axes]:
    """Return axes with n rows, the first on top, and room for their names on the left."""
    figure, axes = one_pair(WIDTH, ROW * n + 50, left=NAMES, right=right, top=2, bottom=48)
    axes.set_ylim(n - 0.5, -0.5)
    axes.set_xlim(*x)
    axes.set_yticks([])
    axes.set_xticks([v for v in range(0, 101, 10 if 100 - x[0] < 60 else 20) if v >= x[0]])
    axes.grid(axis="x", color=LINE, lw=0.8)
    return figure, axes


def by_layer(axes: Axes, n: int) -> None:
    """Label the x axis with n layers."""
    axes.set_xlim(0.3, n + 0.7)
    axes.set_xticks(ticks(n, first=1))
    axes.set_xlabel("layer, in network order")
    axes.grid(axis="y", color=LINE, lw=0.8)


def ticks(n: int, first: int = 0) -> list[int]:
    """Return `first` … n in at most six steps of 1, 2 or 5 times a power of ten."""
    step = next(m * 10**p for p in range(9) for m in (1, 2, 5) if m * 10**p * 6 >= n)
    return [first, *(v for v in range(step, n + 1, step) if v > first)]


def as_svg(figure: Figure, label: str, key: str, names: Sequence[str] = ()) -> str:
    """Return the figure as SVG text, with a name on the left of every row.

    Screen readers read `label`. All ids begin with `key`.
    """
    stream = io.BytesIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=no_metadata)
    svg = lean(stream.getvalue(), label, key)
    for i, name in enumerate(names):
        y = f"{2 + ROW * (i + 0.5) + 4:g}"
        text = ET.SubElement(svg, "text", {"class": "name", "x": str(NAMES - 12), "y": y})
        text.text = shortened(name, 17)
    return ET.tostring(svg, encoding="unicode")
