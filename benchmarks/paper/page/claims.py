"""What we expected, and what came out: each number and each verdict is computed from rows."""

from __future__ import annotations

import math
import statistics

from .. import metric, parameters
from ..published import TABLE1
from ..settings import LONGER, WHOLE
from . import curves, metrics, reproduced, spectra, stats
from .numbers import share
from .rows import NAMES, Rows, cell, longer
from .tables import METHODS, key1
from .verdicts import FAILS, HOLDS, MISSED, ON_THE_MEAN, OPEN, WIDE, WITHIN, Claim, judged, unless


def claims(found: Rows) -> list[Claim]:
    """All of them, in the order of the page."""
    return [
        near_ra(found),
        chosen(found),
        *(equal_parameters(found, other) for other in ("svd-fta", "fta", "pca-fta")),
        jointly(found),
        *(closed_form(found, t) for t in parameters.START_THRESHOLDS),
        *(loss(found, b, tuned) for b in metrics.backbones(found) for tuned in (False, True)),
        well_trained(found),
        order(found),
        eta(found),
        falls_faster(found),
    ]


def near_ra(found: Rows) -> Claim:
    claim = (
        f"CovNorm (t = 0.99) is within {WITHIN} point of RA on the mean, at no more than 1/8 of "
        "its adapter parameters"
    )
    ours, ra = key1(found, "covnorm"), key1(found, "ra")
    pair = stats.paired(found.values(ours), found.values(ra), found.domains)
    if pair is None:
        return Claim("near-ra", claim, "", OPEN)
    size, whole = found.mean(ours, "parameters"), found.mean(ra, "parameters")
    assert size and whole  # noqa: PT018
    numbers = (
        f"CovNorm against RA: {stats.sentence(pair)}, with {share(size, whole)} of RA's parameters"
    )
    verdict = judged(-WITHIN, pair, len(found.domains))
    return Claim("near-ra", claim, numbers, unless(size / whole > 1 / 8, verdict))


def chosen(found: Rows) -> Claim:
    claim = f"With t chosen on validation it is still within {WITHIN} point, at no more than 1/15"
    pair, size, picked = curves.chosen(found, WITHIN)
    if pair is None:
        return Claim("chosen", claim, "", OPEN)
    numbers = f"{picked}: {stats.sentence(pair)}, with {share(size, 1)} of RA's parameters"
    verdict = judged(-WITHIN, pair, len(parameters.DOMAINS))
    return Claim("chosen", claim, numbers, unless(size > 1 / 15, verdict))


def equal_parameters(found: Rows, other: str) -> Claim:
    claim = f"CovNorm is above {NAMES[other]} at equal parameters, on the mean"
    pair, points = curves.against(found, other)
    if pair is None:
        return Claim(f"equal-{other}", claim, "", OPEN)
    where = f"{points} points of CovNorm's curves lie within the other's range"
    verdict = judged(0, pair, len(parameters.DOMAINS))
    return Claim(f"equal-{other}", claim, f"{stats.sentence(pair)}; {where}", verdict)


def jointly(found: Rows) -> Claim:
    claim = (
        f"Joint CovNorm is within {WITHIN} point of independent CovNorm, with fewer parameters a "
        "domain"
    )
    keys = key1(found, "covnorm-joint"), key1(found, "covnorm")
    pair = stats.paired(found.values(keys[0]), found.values(keys[1]), found.domains)
    if pair is None:
        return Claim("joint", claim, "", OPEN)
    joint, alone = (found.mean(k, "parameters") for k in keys)
    assert joint and alone  # noqa: PT018
    numbers = (
        f"joint against independent: {stats.sentence(pair)}, with {share(joint, alone)} of its "
        "parameters, an equal part of what is shared included"
    )
    verdict = judged(-WITHIN, pair, len(found.domains))
    return Claim("joint", claim, numbers, unless(joint >= alone, verdict))


def closed_form(found: Rows, t: float) -> Claim:
    claim = (
        f"The closed form of M is above a random M by a wide margin ({WIDE:g} points) at equal "
        f"tuning, t = {t:g}"
    )
    of = {M: {"variance": t} | ({} if M == "closed-form" else {"M": M}) for M in parameters.STARTS}
    values = {M: found.values(cell("vgg16", "covnorm", o)) for M, o in of.items()}
    ours = values["closed-form"]
    pairs = {
        M: stats.paired(ours, v, parameters.DOMAINS) for M, v in values.items() if v is not ours
    }
    random = pairs["random"]
    if random is None:
        return Claim(f"closed-form-{t:g}", claim, "", OPEN)
    numbers = "; ".join(f"against {M} M: {stats.sentence(p)}" for M, p in pairs.items())
    verdict = judged(WIDE, random, len(parameters.DOMAINS))
    return Claim(f"closed-form-{t:g}", claim, numbers, verdict)


def loss(found: Rows, backbone: str, tuned: bool) -> Claim:
    """It holds where the interval of the gain lies above 0; else the least gain is judged."""
    stage = metrics.STAGES[tuned]
    claim = f"The metric of the loss is above that of the variance on {backbone}, {stage}"
    pairs = {s: metrics.gain(found, backbone, "variance", s, tuned) for s in metric.SHARES}
    key = f"loss-{backbone}-{stage.replace(' ', '-')}"
    known = {s: p for s, p in pairs.items() if p is not None}
    if not known:
        return Claim(key, claim, "", OPEN)
    numbers = "; ".join(f"1/{s}: {stats.sentence(p)}" for s, p in pairs.items())
    above = [f"1/{s}" for s, p in known.items() if p.verdict == "above"]
    if len(known) < len(pairs) or min(p.domains for p in known.values()) < len(found.domains):
        verdict = OPEN
    elif len(above) == len(pairs):
        verdict = HOLDS
    elif above:
        verdict = f"Holds at {' and '.join(above)} alone"
    else:
        verdict = judged(0, min(known.values(), key=lambda p: p.mean), len(found.domains))
    return Claim(key, claim, numbers, verdict)


def well_trained(found: Rows) -> Claim:
    claim = (
        f"RA is well trained: {LONGER} epochs instead of {WHOLE} raise it by no more than {WITHIN} "
        "point on validation"
    )
    more, usual = (found.values(k, "validation") for k in (longer("vgg16"), cell("vgg16", "ra")))
    pair = stats.paired(usual, more, found.domains)
    if pair is None:
        return Claim("well-trained", claim, "", OPEN)
    numbers = f"{WHOLE} epochs against {LONGER}: {stats.sentence(pair)}"
    verdict = judged(-WITHIN, pair, len(found.domains))
    return Claim("well-trained", claim, numbers, verdict)


def order(found: Rows) -> Claim:
    """Of every two methods of the paper's table, whether the better one is the better one here."""
    claim = "The methods are in the paper's order"
    wanted = [m for m in METHODS if m in TABLE1]
    pairs = reproduced.pairs_in_order(found)
    if not pairs:
        return Claim("order", claim, "", OPEN)
    same = sum(pair.mean > 0 for pair in pairs.values())
    reversed_ = [k for k, pair in pairs.items() if pair.verdict == "below"]
    clearly = ", ".join(f"{NAMES[b]} over {NAMES[a]}" for a, b in reversed_)
    numbers = (
        f"{same} of {len(pairs)} pairs are in the same order on the mean, "
        f"{len(reversed_) or 'none'} clearly in the other" + f": {clearly}" * bool(clearly)
    )
    if same == len(pairs):
        sure = all(pair.verdict == "above" for pair in pairs.values())
        verdict = HOLDS if sure else ON_THE_MEAN
    else:
        verdict = FAILS if reversed_ else MISSED
    whole = len(pairs) == math.comb(len(wanted), 2)
    return Claim("order", claim, numbers, verdict if whole else OPEN)


def eta(found: Rows) -> Claim:
    claim = "η = ky/kx falls with depth, as in the paper's figure (t = 0.99)"
    if not spectra.measured(found):
        return Claim("eta", claim, "", OPEN)
    by_layer = spectra.ratios(found, "0.99").mean(0)
    third = max(1, len(by_layer) // 3)
    first, last = by_layer[:third].mean(), by_layer[-third:].mean()
    numbers = f"mean of the first {third} layers {first:.2f}, of the last {third} {last:.2f}"
    verdict = HOLDS if last < first else FAILS
    return Claim("eta", claim, numbers, verdict if spectra.whole(found) else OPEN)


def falls_faster(found: Rows) -> Claim:
    """By the mean of each curve: how early a spectrum has its variance."""
    claim = "The eigenvalues of x and y fall faster than the singular values of A"
    names = spectra.sites(found)
    if not names:
        return Claim("falls-faster", claim, "", OPEN)
    means = {s: {k: v.mean() for k, v in spectra.curves(found, s).items()} for s in names}
    faster = {k: sum(m[k] > m["A"] for m in means.values()) for k in ("x", "y")}
    takes = {k: 100 * statistics.fmean(spectra.needed(found, s)[k] for s in names) for k in "xyA"}
    numbers = (
        f"x in {faster['x']}, y in {faster['y']} of {len(names)} layers; 99 % of the variance "
        f"takes {takes['x']:.0f} % of the directions of x, {takes['y']:.0f} % of y's and "
        f"{takes['A']:.0f} % of A's, on the mean over the layers"
    )
    verdict = HOLDS if all(n == len(names) for n in faster.values()) else FAILS
    return Claim("falls-faster", claim, numbers, verdict if spectra.whole(found) else OPEN)
