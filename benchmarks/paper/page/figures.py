"""The figures of the page, drawn on the canvas of `torch_covnorm.report`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_covnorm.report.canvas import WIDTH, as_svg, by_layer, house_style, named_rows, one_pair
from torch_covnorm.report.svg import BLUE, GREEN, INK, LINE, ORANGE, SOFT, VARIABLES, VIOLET

from .. import metric, parameters
from ..compare import over_seeds
from ..dimensions import THRESHOLDS, explained, ratios
from ..keys import SPECTRA, cell, cut, start
from ..published import NAMES, TABLE1
from ..rows import Rows
from .tables import METHODS, accuracies, full_size

LOOKS = [*zip((BLUE, ORANGE, GREEN, VIOLET, SOFT) * 2, "os^DvxPX*p", strict=True)]
SIZE = "adapter parameters, % of RA's"
DASHES = ((0, (4, 2.5)), (0, (1, 2)), "-")
Drawn = Iterator[tuple[str, str, Any, Sequence[str]]]  # name, what it shows, figure, row names


class Curve(NamedTuple):
    """A line of a chart; points are x, y and the two ends of a bar."""

    label: str
    look: tuple[str, str]
    points: Sequence[tuple[float, float, float, float]]
    tuned: bool = True


def draw(rows: Rows) -> dict[str, dict[str, str]]:
    """Return {name of a figure's file: {"svg", "about"}}; what has no rows is not drawn."""
    drawn = {}
    with house_style():
        for group in (_table1, _parameters, _cuts, _eta, _explained):
            for name, about, figure, labels in group(rows):
                width, height = 72 * figure.get_size_inches()
                svg = _standalone(as_svg(figure, about, name, labels), width, height)
                drawn[name] = {"svg": svg, "about": about}
    return drawn


def _standalone(svg: str, width: float, height: float) -> str:
    """Return the report's SVG as a file: with its own colours, font and background."""
    for color, name in VARIABLES.items():
        svg = svg.replace(name, color)
    style = f"<style>text{{font:12px sans-serif;fill:{SOFT}}}.name{{text-anchor:end}}</style>"
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    size = f'xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    svg = svg.replace("<svg", f"<svg {size}", 1)
    return svg.replace(">", f">{style}{ground}", 1) + "\n"


def _chart(
    curves: Sequence[Curve],
    title: str,
    labels: tuple[str, str],
    levels: Mapping[str, float] | None = None,
    columns: int = 2,
    width: float = WIDTH,
) -> tuple[Any, Any]:
    """Draw curves with bars on a logarithmic x axis, horizontal levels, and a legend above."""
    names = dict.fromkeys((*(c.label for c in curves), *(levels or ())))
    above = 16 + 20 * (-(-len(names) // columns) + bool(title))
    figure, axes = one_pair(width, 290 + above, left=56, right=20, top=above, bottom=48)
    for label, (color, marker), points, tuned in curves:
        x, y, low, high = zip(*points, strict=True)
        style = {} if tuned else {"ls": DASHES[0], "mfc": "none"}
        style["label"] = label if names.pop(label, 0) is None else None
        axes.plot(x, y, color=color, marker=marker, lw=1.5, ms=5.4, **style)
        axes.vlines(x, low, high, color=color, lw=1.2)
    for (name, value), style in zip((levels or {}).items(), DASHES, strict=False):
        axes.axhline(value, color=INK, lw=1, ls=style, zorder=1, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.grid(axis="y", color=LINE, lw=0.8)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.03, 1.01), "borderpad": 0}
    axes.legend(**place, ncols=columns, title=title, alignment="left", frameon=False)
    return figure, axes


def _about(text: str, curves: Sequence[Curve], digits: int = 1) -> str:
    """Describe a chart by its values."""
    lines = []
    for label, _, points, tuned in curves:
        values = ", ".join(f"{point[1]:.{digits}f}" for point in points)
        lines.append(f"{label}{'' if tuned else ', not tuned'} {values}")
    return f"{text}: {'; '.join(lines)}"


def _table1(rows: Rows) -> Drawn:
    """Draw the means of Table 1, ours (a line spans the seeds) and published."""
    ours = {m: over_seeds(accuracies(rows, m), rows.domains) for m in METHODS}
    ours = {m: values for m, values in ours.items() if values}
    theirs = {m: TABLE1[m][1] for m in ours if m in TABLE1}
    if ours:
        low = min(*theirs.values(), *(v for values in ours.values() for v in values), 100)
        figure, axes = named_rows(len(ours), (10 * np.floor((low - 3) / 10), 100), right=14)
        for i, (method, values) in enumerate(ours.items()):
            axes.plot(theirs.get(method, math.nan), i, "D", color=SOFT, mfc="none", ms=5.6, mew=1.3)
            axes.plot([min(values), max(values)], [i, i], color=BLUE, lw=1.6)
            axes.plot(statistics.fmean(values), i, "o", color=BLUE, ms=6)
        axes.set_xlabel("mean test accuracy, %")
        about = ", ".join(f"{NAMES[m]} {statistics.fmean(v):.1f}" for m, v in ours.items())
        yield "table1", f"Mean test accuracy in percent: {about}", figure, [NAMES[m] for m in ours]


def _parameters(rows: Rows) -> Drawn:
    """Draw accuracy against parameters, one panel per domain; lines are of seed 0."""
    whole = full_size(rows, "vgg16")
    for domain in parameters.DOMAINS:
        first, curves = rows.only_seed(0, [domain]), []
        for method, look in zip(parameters.CURVES, LOOKS, strict=False):
            points = []
            for key in [cell("vgg16", method, options) for options in parameters.curve(method)]:
                if whole and (size := first.mean(key, "parameters")):
                    y = rows.values(key)[domain]
                    points.append((100 * size / whole, y[0], min(y.values()), max(y.values())))
            curves += [Curve(NAMES[method], look, sorted(points))] if points else []
        bounds = {m: first.values(cell("vgg16", m)) for m in parameters.BOUNDS}
        levels = {NAMES[m]: values[domain][0] for m, values in bounds.items() if values}
        if curves:
            about = _about(f"Test accuracy against adapter parameters on {domain}", curves)
            figure, _ = _chart(curves, domain, (SIZE, "test accuracy, %"), levels)
            yield f"parameters-{domain}", about, figure, ()


def _cuts(rows: Rows) -> Drawn:
    """Draw mean accuracy ± standard error against parameters, for every way to cut A."""
    for backbone in metric.BACKBONES:
        known, whole, curves = metric.means(rows, backbone), full_size(rows, backbone), []
        for i, (way, tuned) in enumerate(itertools.product(metric.WAYS, (True, False))):
            points = []
            for share in metric.SHARES:
                size = rows.mean(cut(backbone, way, share, tuned), "parameters")
                if (way, share, tuned) in known and size and whole:
                    mean, off = known[way, share, tuned]
                    x = (1 + 0.017 * (i - 7.5)) * 100 * size / whole  # aside: no bar hides another
                    points.append((x, mean, mean - (off or 0), mean + (off or 0)))
            label, look = metric.WAYS[way], LOOKS[i // 2]
            curves += [Curve(label, look, sorted(points), tuned)] if points else []
        domains = metric.whole_domains(rows, backbone)
        A = over_seeds(rows.values(start(backbone)), domains)
        level = {"A, not cut": statistics.fmean(A)} if A else {}
        title = f"{backbone}, mean of {len(domains)} domains; dashed: not tuned"
        if curves:
            about = _about(f"Mean test accuracy against adapter parameters on {backbone}", curves)
            figure, _ = _chart(curves, title, (SIZE, "mean test accuracy, %"), level, columns=1)
            yield f"metric-{backbone}", about, figure, ()


def _eta(rows: Rows) -> Drawn:
    """Draw η = ky/kx by layer for each threshold: the mean and the range over domains."""
    measured, curves = list(rows.of(SPECTRA).values()), []
    for i, t in enumerate(THRESHOLDS if measured else ()):
        eta = ratios(measured, t)
        x = np.arange(1, eta.shape[1] + 1) + 0.16 * (i - 1)
        points = [*zip(x, eta.mean(0), eta.min(0), eta.max(0), strict=True)]
        curves.append(Curve(f"t = {t:g}", LOOKS[i], points))
    if curves:
        figure, axes = _chart(curves, "", ("", "η = ky / kx"), {"kx = ky": 1.0}, columns=4)
        axes.set(xscale="linear", ylim=(0, None))
        by_layer(axes, len(curves[0].points))
        about = _about("Mean ratio of effective dimensions by layer", curves, 2)
        yield "eta", about, figure, ()


def _explained(rows: Rows) -> Drawn:
    """Draw the variance explained by a share of the directions in three layers."""
    measured = list(rows.of(SPECTRA).values())
    sites = list(measured[0]["explained"]) if measured else []
    for i in sorted({0, len(sites) // 2, len(sites) - 1} if sites else ()):
        curves, half = [], []
        for (name, values), (color, _) in zip(
            explained(measured, sites[i]).items(), LOOKS, strict=False
        ):
            x, y = 100 * np.arange(1, len(values) + 1) / len(values), 100 * values
            curves.append(Curve(name, (color, ""), [*zip(x, y, y, y, strict=True)]))
            half.append(f"{name} {y[len(y) // 2 - 1]:.0f} %")
        labels, title = ("directions, %", "variance explained, %"), f"layer {i + 1} of {len(sites)}"
        figure, _ = _chart(curves, title, labels, columns=3, width=320)
        about = f"Layer {i + 1}, variance in half of the directions: {', '.join(half)}"
        yield f"explained-{i + 1}", about, figure, ()
