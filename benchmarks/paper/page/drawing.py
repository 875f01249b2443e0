"""What the figures share: axes, error bars, legends, and an SVG as a file of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_covnorm.report.svg import INK, LINE, VARIABLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK = {
    **{"page": "#14171a", "ink": "#e7eaed", "soft": "#a0aab4", "line": "#31373d"},
    **{"track": "#2a3036", "blue": "#6fb3ec", "orange": "#f0a35a", "green": "#5fc79d"},
    "violet": "#c4a0de",
}


def bars(axes: Axes, x: float, low: float, high: float, color: str) -> None:
    """An error bar, upright."""
    axes.plot([x, x], [low, high], color=color, lw=1.2, zorder=1.5)
    for end in (low, high):
        axes.plot(x, end, "_", color=color, ms=7, mew=1.2, zorder=1.5)


def by_share(axes: Axes, x: Sequence[float]) -> None:
    """A logarithmic axis with powers of two, in percent of RA's parameters."""
    axes.set_xscale("log", base=2)
    low, high = min(x, default=1.0) / 1.3, max(x, default=100.0) * 1.3
    ticks = [100 / 2**i for i in range(12, -1, -1) if low <= 100 / 2**i <= high]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{t:.2g}" if t < 10 else f"{t:g}" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("adapter parameters, % of RA's")


def limits(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values, default=0.0), max(values, default=100.0)
    room = max(1.0, 0.06 * (high - low))
    axes.set_ylim(max(0.0, low - room), min(100.5, high + room))
    axes.grid(axis="y", color=LINE, lw=0.8)


def apart(
    values: Mapping[str, float], axes: Axes, pixels: float, height: float
) -> dict[str, float]:
    """Where to write names beside lines so that none covers another."""
    low, high = axes.get_ylim()
    step, placed = pixels * (high - low) / height, {}
    last = -np.inf
    for name in sorted(values, key=lambda n: values[n]):
        last = placed[name] = max(values[name], last + step)
    return placed


def legend(
    axes: Axes, title: str, entries: Sequence[tuple[str, dict[str, Any], Any]], columns: int,
    height: float,
) -> None:  # fmt: skip
    """Above the axes, row by row; nothing of it can meet what is drawn. No style: a gap."""
    rows = -(-len(entries) // columns)
    place, pixel = axes.transAxes, 1 / height
    top = 1 + (14 + 20 * rows) * pixel
    if title:
        axes.text(-0.02, top + 4 * pixel, title, transform=place, color=INK, va="center")
    for i, (text, look, style) in enumerate(entries):
        x = -0.02 + (i % columns) * 1.08 / columns
        y = top - 20 * (1 + i // columns) * pixel
        mark = {"transform": place, "color": look["color"]}
        if style:
            axes.plot([x, x + 0.05], [y, y], lw=1.6, ls=style, **mark)
        if look["marker"]:
            axes.plot(x + 0.025, y, look["marker"], ms=5.4, **mark)
        axes.text(x + 0.07, y, text, transform=place, va="center")


def alone(svg: str) -> str:
    """A figure as a file of its own: its colours, light or dark, and a ground behind it."""
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    light = "".join(f"--{name[6:-1]}:{color};" for color, name in VARIABLES.items())
    dark = "".join(f"--{name}:{color};" for name, color in DARK.items())
    font = "-apple-system,'Segoe UI',Roboto,'Noto Sans','Liberation Sans',Arial,sans-serif"
    style = (
        f"<style>svg{{{light}font:12px {font}}}text{{font-size:12px;fill:var(--soft)}}"
        ".name{fill:var(--ink);text-anchor:end}"
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    )
    ground = '<rect width="100%" height="100%" style="fill:var(--page)"/>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    head, _, rest = svg.partition(">")
    return start + head.removeprefix("<svg ") + ">" + style + ground + rest + "\n"
