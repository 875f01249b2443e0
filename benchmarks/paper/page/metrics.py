"""The tables of the metrics: accuracy at 1/8, 1/16 and 1/32 of RA's parameters, and the gains."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from .. import joint, metric
from ..profiles import JOINT, SEEDS
from ..settings import rate
from . import stats
from .blocks import Table
from .numbers import NONE, number, share, spread
from .rows import Rows, adapters, cut, said, start

WORDS = {
    "threshold": "CovNorm, one threshold (the paper)",
    "variance": "CovNorm, one budget, metric of the variance",
    "loss": "CovNorm, one budget, metric of the loss",
    "loss-train": "the same, gradients of the training images",
    "svd": "SVD, one ratio",
    "svd-greedy": "SVD, one budget",
    "svd-loss-ranks": "SVD, ranks of the loss metric",
    "svd-scaled": "SVD of scaled A (after ASVD), one budget",
}
STAGES = {False: "not tuned", True: "tuned"}


def planned(seed: int = SEEDS[0]) -> list[tuple[str, int, bool]]:
    """(way, share, tuned) of every cell of a domain and seed; the first has all there are."""
    nowhere: Any = SimpleNamespace(where=lambda *_: {}, rate=lambda _: 0.0)
    return [(k["way"], k["share"], k["tuned"]) for k in metric.keys(nowhere, "", seed)]


def whole_domains(found: Rows, backbone: str) -> list[str]:
    """Those in which some seed has what every seed is to have: all means are over the same."""
    keys = [cut(backbone, *way) for way in planned(SEEDS[-1])]
    places = [set(found.of(k)) for k in keys]
    whole = set.intersection(*places)
    first = min((seed for _, seed in whole), default=0)
    return [d for d in found.domains if (d, first) in whole]


def means(found: Rows, backbone: str) -> dict[tuple[str, int, bool], tuple[float, float | None]]:
    """{(way, share, tuned): (mean over domains and seeds, its standard error over seeds)}."""
    domains, result = whole_domains(found, backbone), {}
    for way in planned():
        values = stats.over_seeds(found.values(cut(backbone, *way)), domains)
        if values:
            result[way] = statistics.fmean(values), stats.error(values)
    return result


def first_seed(found: Rows, backbone: str) -> dict[tuple[str, int, bool], float]:
    """{(way, share, tuned): mean over domains} of seed 0, which every way has."""
    alone = Rows([r for r in found.all if r["seed"] == SEEDS[0]], found.domains)
    return {way: mean for way, (mean, _) in means(alone, backbone).items()}


def table(found: Rows, backbone: str) -> Table:
    """Accuracy of every way at every share."""
    known, domains = means(found, backbone), whole_domains(found, backbone)
    stages = [(s, t) for t in (False, True) for s in metric.SHARES]
    body = []
    for way in metric.WAYS:
        cells = [known.get((way, s, t)) for s, t in stages]
        body.append([WORDS.get(way, way), *(_with_error(c) for c in cells)])
    ra = stats.over_seeds(found.values(start(backbone)), domains)
    keys = [cut(backbone, *way) for way in planned()]
    over = f"{len(domains)} of {len(found.domains)} domains" + (
        f" ({', '.join(domains)})" if 0 < len(domains) < len(found.domains) else ""
    )
    caption = (
        f"Mean test accuracy in percent on {backbone}, over {over}; ± is its standard error over "
        f"seeds; without it, of seed 0 alone, where {_on_the_first(found, backbone)}. A itself on "
        f"the same: {spread(ra)}. {NONE}: not run, or not of all of these. Tuned at "
        f"{_rates(backbone, known)}: each at the best of three by the validation images of "
        "objects and sketches, seed 0."
    )
    wanted = len(found.domains) * sum(len(planned(seed)) for seed in SEEDS)
    head = ["A cut to a share of its parameters by", *(f"1/{s}, {STAGES[t]}" for s, t in stages)]
    rows_of = [said(start(backbone)), *(said(k) for k in keys)]
    return Table(caption, head, body, backbone, rows_of, (found.count(keys), wanted))


def _on_the_first(found: Rows, backbone: str) -> str:
    """The two metrics as they are on the seed of those that have no other."""
    known = first_seed(found, backbone)
    said = {
        m: " / ".join(number(known.get((m, s, False))) for s in metric.SHARES)
        for m in metric.METRICS
    }
    return " and ".join(f"the metric of the {m} has {v} not tuned" for m, v in said.items())


def _rates(backbone: str, known: Iterable[tuple[str, int, bool]]) -> str:
    """Of the ways that were tuned."""
    ways = dict.fromkeys(way for way, _, tuned in known if tuned)
    at = {WORDS[way]: rate(backbone, f"cut-{way}") for way in ways}
    return ", ".join(f"{rate:g} ({w.removeprefix('CovNorm, ')})" for w, rate in at.items()) or NONE


def _with_error(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return NONE
    return f"{value[0]:.1f}" + ("" if value[1] is None else f" ± {value[1]:.1f}")


def gain(
    found: Rows, backbone: str, other: str, share_: int, tuned: bool, way: str = "loss"
) -> stats.Comparison | None:
    """Of a way over another at one share, paired by domain."""
    pair = [found.values(cut(backbone, w, share_, tuned)) for w in (way, other)]
    return stats.paired(*pair, found.domains)


def best(found: Rows, backbone: str, share_: int, tuned: bool) -> str | None:
    """The neighbour of the highest mean on the seed that all have: none of our own ways."""
    ours = (*metric.METRICS, "loss-train")
    known = {w: of for (w, s, t), of in first_seed(found, backbone).items()
             if (s, t) == (share_, tuned) and w not in ours}  # fmt: skip
    return max(known, key=lambda way: known[way]) if known else None


def gains(found: Rows, backbone: str) -> Table:
    """The gain of the metric of the loss, with what is to be said about it."""
    body = []
    for tuned in (False, True):
        for share_ in metric.SHARES:
            lines = [("metric of the variance", "loss", "variance")]
            if neighbour := best(found, backbone, share_, tuned):
                lines.append((f"best neighbour: {WORDS[neighbour]}", "loss", neighbour))
            if not tuned:
                name = "metric of the variance, with gradients of the training images"
                lines.append((name, "loss-train", "variance"))
            for name, way, other in lines:
                compared = gain(found, backbone, other, share_, tuned, way)
                line = [f"1/{share_}", STAGES[tuned], name]
                gained = NONE if compared is None else stats.signed(compared.mean)
                body.append([*line, gained, stats.sentence(compared)])
    caption = (
        f"The gain of the metric of the loss on {backbone}, in points, paired: of every domain the "
        "mean over seeds, then a 95 % interval by Student's t over the domains. The best neighbour "
        "was chosen by the test accuracies themselves, which favours it. Of twenty such "
        "intervals one is expected to miss 0 by chance. Made of the rows of the table above."
    )
    head = ["of RA's", "stage", "over", "gain", "significance"]
    return Table(caption, head, body, backbone, left=(0, 1, 2, 4))


def shared(found: Rows, backbone: str = "efficientnet-lite0") -> Table:
    """Joint mode at equal ranks: shared bases of the variance, of the loss, of the A's."""
    keys = {(r, w, t): _joint(backbone, r, w, t, len(found.domains))
            for r in joint.RATIOS for w in joint.WAYS for t in (False, True)}  # fmt: skip
    ra, body = adapters(found, backbone), []
    names = {"variance": "variance", "loss": "loss", "diagonal": "A's alone (after JD-Full)"}
    for ratio in joint.RATIOS:
        for way in joint.WAYS:
            pair = [keys[ratio, way, t] for t in (False, True)]
            cells = [stats.over_seeds(found.values(k), found.domains) for k in pair]
            size = share(found.mean(pair[0], "parameters"), ra)
            body.append([f"d/{1 / ratio:g}", names.get(way, way), *map(spread, cells), size])
    caption = (
        f"Joint mode on {backbone}: all domains share C and W, each has its M. "
        "Mean test accuracy in percent; ± is the standard deviation over seeds. Parameters a "
        "domain, with its part of what is shared. All are tuned at "
        f"{rate(backbone, 'shared'):g}, which was not searched. Bases of the loss, tuned, "
        f"{_gained(found, backbone, names)}."
    )
    head = ["kx = ky", "shared bases of", "not tuned", "tuned", "of RA's parameters"]
    wanted = len(keys) * len(found.domains) * len(JOINT)
    have = found.count(keys.values())
    rows_of = [said(k) for k in keys.values()]
    return Table(caption, head, body, backbone, rows_of, (have, wanted), (0, 1))


def _joint(backbone: str, ratio: float, way: str, tuned: bool, n: int) -> Mapping[str, Any]:
    key = {"backbone": backbone, "method": "shared", "way": way, "ratio": ratio}
    key |= {"sharing": n, "tuned": tuned}
    return {**key, "lr": rate(backbone, "shared")} if tuned else key


def _gained(found: Rows, backbone: str, names: Mapping[str, str]) -> str:
    """What shared bases of the loss gain over the others', paired by domain, in words."""
    said = []
    for ratio in joint.RATIOS:
        tuned = {
            w: found.values(_joint(backbone, ratio, w, True, len(found.domains)))
            for w in joint.WAYS
        }
        for other in joint.WAYS:
            if other != "loss":
                pair = stats.paired(tuned["loss"], tuned[other], found.domains)
                name = names[other].partition(" (")[0]
                said.append(f"against those of {name} at d/{1 / ratio:g}: {stats.sentence(pair)}")
    return "; ".join(said)


def backbones(found: Rows) -> Sequence[str]:
    """Those that were cut, and those that are to be."""
    known = ["vgg16", "efficientnet-lite0"]
    return known + sorted({r["backbone"] for r in found.all if r["method"] == "cut"} - {*known})
