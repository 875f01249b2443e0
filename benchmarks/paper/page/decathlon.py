"""Table 2 from rows: the mini-Decathlon."""

from __future__ import annotations

import statistics

from ...originals import Archive
from .. import pretraining, table2
from . import stats
from .blocks import Table
from .numbers import NONE, number, spread
from .rows import NAMES, Rows, cell, said


def table(found: Rows, archive: Archive | None = None) -> Table:
    """Accuracy and points a domain, score, size: of our domains, or of the Decathlon's own."""
    origin, made_with = pretraining.origin(archive), pretraining.weights(archive)
    domains = [d for d in found.domains if d != origin]
    rows = [r for r in found.all if r.get("weights") == made_with]
    found = Rows(rows, (*domains, origin))
    keys = {m: cell("resnet26", m, table2.OPTIONS.get(m, {})) for m in table2.METHODS}
    means = {m: {d: statistics.fmean(v.values()) for d, v in found.values(k).items()}
             for m, k in keys.items()}  # fmt: skip
    base = means[table2.BASELINE]
    tested = {d: row["n"] for k in keys.values() for (d, _), row in found.of(k).items()}
    smallest = min(tested, key=lambda d: tested[d], default=None)
    body = []
    for method, key in keys.items():
        points = {d: _points(means[method].get(d), base.get(d), tested.get(d)) for d in domains}
        # Of the smallest test part one image is worth hundreds of points: also without it.
        scores = [
            ([p for d in of if (p := points[d]) is not None], len(of))
            for of in (domains, [d for d in domains if d != smallest])
        ]
        size = found.mean(key, "of_network")
        body.append(
            [
                NAMES[method],
                *(
                    f"{number(means[method].get(d))} ({number(points[d], 0)})"
                    if d in means[method]
                    else NONE
                    for d in domains
                ),
                spread(stats.over_seeds(found.values(key), domains)),
                *(number(sum(p), 0) if len(p) == n else NONE for p, n in scores),
                NONE if size is None else f"{1 + len(domains) * size:.2f}",
            ]
        )
    sources = found.of({"backbone": "resnet26", "method": "source"})
    source = f"{sources[origin, 0]['accuracy']:.1f} %" if sources else "not measured yet"
    other = "other domains, other images, another pre-training"
    if archive is not None:
        other = "tested on its val parts, another pre-training"
    caption = (
        "Table 2, a mini-Decathlon. Test accuracy in percent and, in brackets, points by the "
        "Decathlon's formula against our own fine-tuned networks (FNFT, which gets 250 a domain by "
        "definition; no error at all counts as half an image). It compares with no leaderboard: "
        f"{other}. "
        f"ResNet-26 was pre-trained here on {origin} (test accuracy {source}), which is no part of "
        "the score. The fewer images there are to test, the more points one of them is worth: so "
        "the score also without the fewest. Size: of the network and its domains, in networks. LwF "
        "has no warm-up of its head, so that all see the images as often, and a fork of the "
        "network for each domain, trained from the first network and not one from the other"
        f"{_kept(found, origin)}."
    )
    run = sum(len(found.of(k)) for k in keys.values()), len(keys) * len(domains)
    head = [
        "method",
        *domains,
        "mean",
        "score",
        f"without {smallest}" if smallest else "without one",
        "size",
    ]
    return Table(caption, head, body, "resnet26", [said(k) for k in keys.values()], run)


def _points(accuracy: float | None, baseline: float | None, n: int | None) -> float | None:
    """By the formula, which divides by the baseline's error: none counts as half an image of n."""
    if accuracy is None or baseline is None or n is None:
        return None
    most = 100 * (1 - 0.5 / n)
    return float(table2.score({"it": min(accuracy, most)}, {"it": min(baseline, most)})["total"])


def _kept(found: Rows, origin: str) -> str:
    """What LwF's forks still know of the first domain."""
    after = found.values(cell("resnet26", "lwf", table2.OPTIONS["lwf"]), "forgetting", "after")
    if not after:
        return ""
    mean = statistics.fmean(v for of_seeds in after.values() for v in of_seeds.values())
    return f"; on {origin} the forks still have {mean:.1f} % on the mean"
