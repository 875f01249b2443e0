"""Our expectations judged by the rows; the template states them."""

from __future__ import annotations

import math
import statistics
from itertools import combinations
from typing import NamedTuple

import numpy as np

from .. import metric, parameters
from ..compare import Comparison, paired
from ..dimensions import explained, ratios
from ..keys import SPECTRA, cell, longer
from ..published import NAMES, TABLE1
from ..rows import Rows
from ..settings import LONGER, WHOLE
from .numbers import sentence, share
from .tables import METHODS, compared, key1

WITHIN = 0.5  # points that count as no difference
WIDE = 5.0  # points that are a wide margin: decided before any of its cells was run
HOLDS, ON_THE_MEAN = "Holds", "Holds on the mean only"
MISSED, FAILS = "Missed on the mean, not refuted", "Does not hold"
TOO_LARGE, OPEN = "Does not hold: too many parameters", "Not run yet"


class Claim(NamedTuple):
    """A verdict, and the numbers it rests on in words."""

    verdict: str
    numbers: str


def judge(
    pair: Comparison | None, at_least: float, domains: int, numbers: str, fits: bool = True
) -> Claim:
    """Judge whether a difference is at least so many points, once all domains were run."""
    if pair is None or pair.domains < domains:
        return Claim(OPEN, numbers if pair else "")
    if not fits:
        return Claim(TOO_LARGE, numbers)
    if pair.mean < at_least:
        return Claim(FAILS if pair.high < at_least else MISSED, numbers)
    return Claim(HOLDS if pair.low >= at_least else ON_THE_MEAN, numbers)


def claims(rows: Rows) -> dict[str, Claim]:
    """Return {key: claim}."""
    n, two = len(rows.domains), len(parameters.DOMAINS)
    result = {}
    sizes = {m: rows.mean(key1(rows, m), "parameters") or math.nan for m in METHODS}
    part = sizes["covnorm"] / sizes["ra"]
    pair = compared(rows, "covnorm", "ra")
    text = f"CovNorm compared with RA: {sentence(pair)}, with {share(part, 1)} of RA's parameters"
    result["near-ra"] = judge(pair, -WITHIN, n, text, fits=part <= 1 / 8)

    pair, part, chosen = parameters.smallest_near_ra(rows, WITHIN)
    text = f"{chosen}: {sentence(pair)}, with {share(part, 1)} of RA's parameters"
    result["chosen"] = judge(pair, -WITHIN, two, text, fits=part <= 1 / 15)

    for other in ("svd-fta", "fta", "pca-fta"):
        pair, points = parameters.above_curve(rows, other)
        text = f"{sentence(pair)}; {points} points of CovNorm's curves lie within the other's range"
        result[f"equal-{other}"] = judge(pair, 0, two, text)

    pair = compared(rows, "covnorm-joint", "covnorm")
    part = sizes["covnorm-joint"] / sizes["covnorm"]
    text = f"joint compared with independent: {sentence(pair)}, with {share(part, 1)} of the "
    text += "parameters, including an equal part of the shared ones"
    result["joint"] = judge(pair, -WITHIN, n, text, fits=part < 1)

    for t in parameters.START_THRESHOLDS:
        closed = rows.values(cell("vgg16", "covnorm", {"variance": t}))
        pairs = {}
        for M in parameters.STARTS[1:]:
            other = rows.values(cell("vgg16", "covnorm", {"variance": t, "M": M}))
            pairs[M] = paired(closed, other, parameters.DOMAINS)
        text = "; ".join(f"against {M} M: {sentence(pair)}" for M, pair in pairs.items())
        result[f"closed-form-{t:g}"] = judge(pairs["random"], WIDE, two, text)

    for backbone in metric.BACKBONES:
        for tuned in (False, True):
            result[f"loss-{backbone}-{tuned}"] = loss_metric(rows, backbone, tuned)

    usual, more = (rows.values(k, "validation") for k in (cell("vgg16", "ra"), longer("vgg16")))
    pair = paired(usual, more, rows.domains)
    text = f"{WHOLE} epochs compared with {LONGER}: {sentence(pair)}"
    result["well-trained"] = judge(pair, -WITHIN, n, text)
    return result | {"order": order(rows), **spectra(rows)}


def loss_metric(rows: Rows, backbone: str, tuned: bool) -> Claim:
    """Hold where the interval of the gain lies above 0; without any, judge the smallest gain."""
    pairs = {s: metric.gain(rows, backbone, "variance", s, tuned) for s in metric.SHARES}
    known = [pair for pair in pairs.values() if pair]
    above = [f"1/{s}" for s, pair in pairs.items() if pair and pair.verdict == "above"]
    text = "; ".join(f"1/{s}: {sentence(pair)}" for s, pair in pairs.items()) if known else ""
    if len(known) < len(pairs) or any(pair.domains < len(rows.domains) for pair in known):
        return Claim(OPEN, text)
    if above:
        at_all = len(above) == len(pairs)
        return Claim(HOLDS if at_all else f"Holds only at {' and '.join(above)}", text)
    return judge(min(known, key=lambda pair: pair.mean), 0, len(rows.domains), text)


def order(rows: Rows) -> Claim:
    """Check for every two methods of the paper's table whether the better one is better here."""
    methods = sorted((m for m in METHODS if m in TABLE1), key=lambda m: -TABLE1[m][1])
    made = {(a, b): compared(rows, a, b) for a, b in combinations(methods, 2)}
    pairs = {k: p for k, p in made.items() if p and p.domains == len(rows.domains)}
    if not pairs:
        return Claim(OPEN, "")
    same = sum(pair.mean > 0 for pair in pairs.values())
    wrong = [k for k, pair in pairs.items() if pair.verdict == "below"]
    clearly = ", ".join(f"{NAMES[b]} over {NAMES[a]}" for a, b in wrong)
    text = f"{same} of {len(pairs)} pairs are in the same order on the mean, "
    text += f"{len(wrong) or 'none'} clearly in the opposite order" + f": {clearly}" * bool(wrong)
    if len(pairs) < len(made):
        return Claim(OPEN, text)
    if same < len(pairs):
        return Claim(FAILS if wrong else MISSED, text)
    sure = all(pair.verdict == "above" for pair in pairs.values())
    return Claim(HOLDS if sure else ON_THE_MEAN, text)


def spectra(rows: Rows) -> dict[str, Claim]:
    """Judge how η = ky/kx changes with depth, and which spectrum falls faster."""
    if not (measured := list(rows.of(SPECTRA).values())):
        return dict.fromkeys(("eta", "falls-faster"), Claim(OPEN, ""))
    by_layer = ratios(measured, 0.99).mean(0)
    third = max(1, len(by_layer) // 3)
    first, last = by_layer[:third].mean(), by_layer[-third:].mean()
    eta = f"mean of the first {third} layers {first:.2f}, of the last {third} {last:.2f}"
    curves = [explained(measured, site) for site in measured[0]["explained"]]
    faster = {k: sum(c[k].mean() > c["A"].mean() for c in curves) for k in "xy"}
    needed = {
        k: 100 * statistics.fmean((1 + int(np.argmax(c[k] >= 0.99))) / len(c[k]) for c in curves)
        for k in "xyA"
    }
    falls = (
        f"x in {faster['x']}, y in {faster['y']} of {len(curves)} layers; 99 % of the variance "
        f"takes {needed['x']:.0f} % of the directions of x, {needed['y']:.0f} % of y's and "
        f"{needed['A']:.0f} % of A's, averaged over the layers"
    )
    whole = {row["domain"] for row in measured} == {*rows.domains}
    held = {"eta": (last < first, eta)}
    held["falls-faster"] = (all(k == len(curves) for k in faster.values()), falls)
    return {k: Claim((HOLDS if h else FAILS) if whole else OPEN, t) for k, (h, t) in held.items()}
