"""The table of the smallest files: what the default of ``covnorm add`` rests on."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from ..profiles import SMALLEST
from ..settings import EPOCHS
from ..smallest import METRICS, options
from . import stats
from .blocks import Table
from .numbers import NONE, share, spread
from .rows import Rows, cell, said, start


def table(found: Rows, backbone: str = "efficientnet-lite0") -> Table:
    """Bytes, parameters and accuracy of the smallest file in each metric, beside RA."""
    keys = {m: cell(backbone, "covnorm", options(m)) for m in METRICS}
    ra = start(backbone)
    there = set.intersection(*(set(found.of(k)) for k in (ra, *keys.values())))
    domains = sorted({d for d, _ in there}, key=found.domains.index)
    whole, body = found.mean(ra, "parameters"), []
    for name, key in (
        (f"RA after {EPOCHS} epochs, float32", ra),
        *((f"metric of the {m}", k) for m, k in keys.items()),
    ):
        rows = [row for place, row in found.of(key).items() if place in there]
        size = f"{statistics.fmean(r['bytes'] for r in rows) / 1e3:.0f} kB" if rows else NONE
        parts = statistics.fmean(r["parameters"] for r in rows) if rows else None
        kinds = Counter(r["dtype"] for r in rows if r.get("dtype"))
        precisions = ", ".join(f"{k} {n}" for k, n in sorted(kinds.items())) or NONE
        both = Rows(rows, domains)  # the places that all have
        cells = [spread(stats.over_seeds(both.values(key, f), domains))
                 for f in ("validation", "accuracy")]  # fmt: skip
        body.append([name, size, share(parts, whole), precisions, *cells])
    caption = (
        f"The smallest file within half a point of RA on validation, on {backbone}: means over "
        f"{len(domains)} of {len(found.domains)} domains, with norms, head and record in the file. "
        f"{_smaller(found, keys)}"
    )
    head = ["", "file", "of RA's parameters", "precisions", "validation %", "test %"]
    wanted = len(keys) * len(found.domains) * len(SMALLEST)
    rows_of = [said(k) for k in (ra, *keys.values())]
    run = (found.count(keys.values()), wanted)
    return Table(caption, head, body, backbone, rows_of, run, (0, 3))


def _smaller(found: Rows, keys: dict[str, dict[str, Any]]) -> str:
    """How much smaller the files of the metric of the loss are, by domain and on the mean."""
    sizes = {m: found.values(k, "bytes") for m, k in keys.items()}
    pair = stats.paired(sizes["loss"], sizes["variance"], found.domains)
    if pair is None:
        return "Not run yet."
    ends = " to ".join(stats.signed(end / 1e3) for end in (pair.low, pair.high))
    fewer = sum(
        statistics.fmean(sizes["loss"][d].values())
        < statistics.fmean(sizes["variance"][d].values())
        for d in found.domains
        if d in sizes["loss"] and d in sizes["variance"]
    )
    return (
        f"In the metric of the loss it is smaller in {fewer} of {pair.domains} domains; the "
        f"difference is {stats.signed(pair.mean / 1e3)} kB on the mean (95 % interval {ends})."
    )
