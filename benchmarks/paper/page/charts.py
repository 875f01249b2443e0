"""The figures of the page: which rows go into which drawing."""

from __future__ import annotations

from torch_covnorm.report.wording import plural

from .. import metric, parameters
from ..dimensions import THRESHOLDS
from ..published import TABLE1
from ..settings import EPOCHS, TUNING
from . import figures, metrics, spectra, stats
from .blocks import Figure
from .numbers import number
from .rows import NAMES, Rows, adapters, cell, cut, said, start
from .tables import METHODS, key1

SHORT = {
    "threshold": "CovNorm, one threshold",
    "variance": "variance metric",
    "loss": "loss metric",
    "loss-train": "loss, training images",
    "svd": "SVD, one ratio",
    "svd-greedy": "SVD, one budget",
    "svd-loss-ranks": "SVD, ranks of the loss",
    "svd-scaled": "scaled SVD",
}


def table1(found: Rows) -> Figure | None:
    """Means of Table 1, ours and published."""
    rows = []
    for method in METHODS:
        ours = stats.over_seeds(found.values(key1(found, method)), found.domains)
        if ours:
            rows.append((NAMES[method], ours, TABLE1[method][1] if method in TABLE1 else None))
    if not rows:
        return None
    values = ", ".join(f"{name} {number(sum(ours) / len(ours))}" for name, ours, _ in rows)
    svg = figures.means(rows, f"Mean test accuracy in percent: {values}", "m")
    caption = (
        "● our means over the domains, VGG16; a line spans the seeds. ◇ the paper's means, of its "
        "own seven datasets: look at the order, not at the distance."
    )
    return Figure(caption, {"table1": svg})


def by_parameters(found: Rows) -> Figure | None:
    """Accuracy against parameters, a panel a domain."""
    whole = adapters(found, "vgg16")
    panels = {}
    for domain in parameters.DOMAINS:
        lines: dict[str, list[figures.Point]] = {}
        for method, options in parameters.cells():
            key = cell("vgg16", method, options)
            rows = [row for (d, _), row in sorted(found.of(key).items()) if d == domain]
            if rows and method not in parameters.BOUNDS and "M" not in options and whole:
                x = 100 * rows[0]["parameters"] / whole
                lines.setdefault(method, []).append((x, [r["accuracy"] for r in rows]))
        bounds = {}
        for method in parameters.BOUNDS:
            values = found.values(cell("vgg16", method)).get(domain, {})
            if values:
                bounds[method] = values[min(values)]
        if lines:
            for points in lines.values():
                points.sort(key=lambda point: point[0])
            about = f"Test accuracy against adapter parameters on {domain}: " + "; ".join(
                f"{NAMES[m]} from {number(p[0][1][0])} to {number(p[-1][1][0])}"
                for m, p in lines.items()
            )
            key = f"p-{domain}"
            panels[f"parameters-{domain}"] = figures.parameters(
                domain, lines, bounds, NAMES, about, key
            )
    caption = (
        "Accuracy against adapter parameters, VGG16: CovNorm over its threshold t, the others over "
        "their ranks, every point tuned. Lines are of seed 0; bars span the seeds where there are "
        "several."
    )
    points = [cell("vgg16", m, o) for m, o in parameters.cells() if "M" not in o]
    made_of = [said(key) for key in points]
    return Figure(caption, panels, backbone="vgg16", made_of=made_of) if panels else None


def by_metric(found: Rows, backbone: str) -> Figure | None:
    """Accuracy against parameters for every way to cut."""
    known = metrics.means(found, backbone)
    lines: dict[tuple[str, bool], list[tuple[float, float, float | None]]] = {}
    for (way, share, tuned), (mean, off) in known.items():
        sizes = found.mean(cut(backbone, way, share, tuned), "parameters")
        whole = adapters(found, backbone)
        x = 100 * sizes / whole if sizes and whole else 100 / share
        lines.setdefault((way, tuned), []).append((x, mean, off))
    if not lines:
        return None
    for points in lines.values():
        points.sort()
    domains = metrics.whole_domains(found, backbone)
    ra = stats.over_seeds(found.values(start(backbone)), domains)
    ordered = {k: lines[k] for w in metric.WAYS for t in (True, False) if (k := (w, t)) in lines}
    about = f"Mean test accuracy against adapter parameters on {backbone}: " + "; ".join(
        f"{SHORT.get(w, w)}, {metrics.STAGES[t]}, {number(p[0][1])} to {number(p[-1][1])}"
        for (w, t), p in ordered.items()
    )
    title = f"{backbone}, mean of {plural(len(domains), 'domain')}"
    mean = sum(ra) / len(ra) if ra else None
    svg = figures.metrics(title, ordered, mean, SHORT, about, f"c-{backbone}")
    caption = (
        f"A cut to a share of its parameters on {backbone}: mean over the domains, bars are the "
        "standard error over seeds; without one, of seed 0 alone. Ways stand side by side within a "
        f"share. A: not cut, after {EPOCHS} epochs; what is tuned has {TUNING} more."
    )
    return Figure(caption, {f"metric-{backbone}": svg})


def eta(found: Rows) -> Figure | None:
    """The ratio of effective dimensions."""
    if not spectra.sites(found):
        return None
    of = {f"{t:g}": spectra.ratios(found, f"{t:g}") for t in THRESHOLDS}
    values = ", ".join(f"{e:.2f}" for e in of["0.99"].mean(0))
    about = f"Ratio of effective dimensions by layer at t = 0.99: {values}"
    caption = (
        "Ratio of effective dimensions η = ky/kx by layer of VGG16: mean over the domains, lines "
        "span all of them. The paper gives no numbers to set beside."
    )
    svg = figures.eta(of, about, "e")
    return Figure(caption, {"eta": svg}, backbone="vgg16", made_of=[said(spectra.KEY)])


def explained(found: Rows) -> Figure | None:
    """Variance explained in three layers: first, middle, last."""
    names = spectra.sites(found)
    if not names:
        return None
    panels = {}
    for i in sorted({0, len(names) // 2, len(names) - 1}):
        curves = spectra.curves(found, names[i])
        half = {k: f"{100 * v[len(v) // 2 - 1]:.0f} %" for k, v in curves.items()}
        about = f"Layer {i + 1}, variance in half of the directions: " + ", ".join(
            f"{k} {v}" for k, v in half.items()
        )
        svg = figures.explained(curves, f"layer {i + 1} of {len(names)}", about, f"v{i + 1}")
        panels[f"explained-{i + 1}"] = svg
    caption = (
        "Variance explained by the first directions of x and y (eigenvalues) and of A (squared "
        "singular values), mean over the domains, VGG16."
    )
    return Figure(caption, panels, "panels", "vgg16", [said(spectra.KEY)])
