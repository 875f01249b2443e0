"""Table 2 from rows: the mini-Decathlon."""

from __future__ import annotations

import statistics

from ...domains import stated
from .. import table2
from ..pretraining import DOMAIN
from .blocks import Table
from .numbers import NONE, number
from .rows import NAMES, Rows, cell, said

SMALLEST = min(stated(), key=lambda d: stated()[d][1][-1])  # by its images to test


def table(found: Rows) -> Table:
    """Accuracy and points a domain, score, size."""
    domains = [d for d in found.domains if d != DOMAIN]
    keys = {m: cell("resnet26", m, table2.OPTIONS.get(m, {})) for m in table2.METHODS}
    means = {m: {d: statistics.fmean(v.values()) for d, v in found.values(k).items()}
             for m, k in keys.items()}  # fmt: skip
    base = means[table2.BASELINE]
    body = []
    for method, key in keys.items():
        points = {d: _points(d, means[method].get(d), base.get(d)) for d in domains}
        # Of the smallest test part one image is worth hundreds of points: also without it.
        scores = [
            ([p for d in of if (p := points[d]) is not None], len(of))
            for of in (domains, [d for d in domains if d != SMALLEST])
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
                *(number(sum(p), 0) if len(p) == n else NONE for p, n in scores),
                NONE if size is None else f"{1 + len(domains) * size:.2f}",
            ]
        )
    sources = list(found.of({"backbone": "resnet26", "method": "source"}).values())
    source = f"{sources[0]['accuracy']:.1f} %" if sources else "not measured yet"
    caption = (
        "Table 2, a mini-Decathlon. Test accuracy in percent and, in brackets, points by the "
        "Decathlon's formula against our own fine-tuned networks (FNFT, which gets 250 a domain by "
        "definition; no error at all counts as half an image). It compares with no leaderboard: "
        "other domains, other images, another pre-training. "
        f"ResNet-26 was pre-trained here on {DOMAIN} (test accuracy {source}), which "
        f"is no part of the score; {SMALLEST} has so few images to test that one of them is worth "
        "hundreds of points. Size: of the network and its domains, in networks. LwF has no warm-up "
        "of its head, so that all see the images as often, and a fork of the network for each "
        f"domain, trained from the first network and not one from the other{_kept(found)}."
    )
    run = sum(len(found.of(k)) for k in keys.values()), len(keys) * len(domains)
    head = ["method", *domains, "score", f"without {SMALLEST}", "size"]
    return Table(caption, head, body, "resnet26", [said(k) for k in keys.values()], run)


def _points(domain: str, accuracy: float | None, baseline: float | None) -> float | None:
    """By the formula, which divides by the baseline's error: none counts as half an image."""
    if accuracy is None or baseline is None:
        return None
    most = 100 * (1 - 0.5 / stated()[domain][1][-1])
    return float(table2.score({"it": min(accuracy, most)}, {"it": min(baseline, most)})["total"])


def _kept(found: Rows) -> str:
    """What LwF's forks still know of the first domain."""
    after = found.values(cell("resnet26", "lwf", table2.OPTIONS["lwf"]), "forgetting", "after")
    if not after:
        return ""
    mean = statistics.fmean(v for of_seeds in after.values() for v in of_seeds.values())
    return f"; on {DOMAIN} the forks still have {mean:.1f} % on the mean"
