"""The learning rate of every kind: the best of at least three on the validation images, one seed.

Two domains decide. If the best rate is at the end of the range, more rates are tried; if rates are
less than half a point apart, a third domain is added. A kind is a method at the size it has in
Table 1, or CovNorm with another start of M; the methods of the figure are also searched at a small
size. The search is the same for all, and its result is written down in `settings.RATES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from . import metric, parameters, table1, table2
from .bench import Bench
from .keys import cell, cut, start
from .published import NAMES
from .rows import Rows
from .settings import EPOCHS, LIKE, SMALL, kind
from .settings import rates as grid

SEARCH = parameters.DOMAINS
FURTHER, TIE = "drawings", 0.5  # the third domain, and the points below which it decides
# The methods of the figure at a small size.
SMALLER: dict[str, dict[str, Any]] = {
    "covnorm": {"variance": parameters.START_THRESHOLDS[0]},
    "svd-fta": {"rank": 1 / 32},
    "fta": {"rank": 1 / 32},
    "pca-fta": {"ratio": 1 / 32},
}
# Searched in addition to Table 1: {kind: (method, options)}.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    kind(method, options): (method, options)
    for method, options in (
        *(("covnorm", start) for start in parameters.starts() if "M" in start),
        *SMALLER.items(),
    )
}


def kinds(backbone: str) -> list[str]:
    """Return the kinds searched on a backbone, without the cuts of `metric`."""
    methods = {
        "vgg16": (*table1.SEVERAL, *table1.ONE, *OTHERS),
        "efficientnet-lite0": ("ra",),
        "resnet26": table2.METHODS,
    }
    return [name for name in methods[backbone] if name not in LIKE and name != "svd"]


def run(bench: Bench) -> None:
    """Measure every kind of a backbone at every rate."""
    for name in kinds(bench.backbone):
        search(bench, name)


def two(backbone: str) -> tuple[str, ...]:
    """Return the domains of the search, none of which the backbone was trained on."""
    return ("products", "sketches") if backbone == "resnet26" else SEARCH


def search(bench: Bench, name: str) -> dict[float, dict[str, float]]:
    """Return {rate: {domain: validation}} of a kind, with the third domain for close rates."""

    def validation(domain: str, lr: float) -> float:
        return float(tried(bench, name, domain, lr)["validation"])

    of = two(bench.backbone)
    found = {lr: {d: validation(d, lr) for d in of} for lr in grid(bench.backbone, name)}
    for lr in close(found):
        found[lr][FURTHER] = validation(FURTHER, lr)
    return found


def mean(values: Mapping[str, float], further: bool = False) -> float:
    """Return the mean over the two domains, or over all three."""
    return statistics.fmean(v for d, v in values.items() if further or d != FURTHER)


def close(found: Mapping[float, Mapping[str, float]]) -> list[float]:
    """Return the rates that the two domains cannot separate from the best, if there are any."""
    means = {lr: mean(values) for lr, values in found.items()}
    near = [lr for lr, value in means.items() if value > max(means.values()) - TIE]
    return near if len(near) > 1 else []


def best(found: Mapping[float, Mapping[str, float]]) -> list[float]:
    """Return the best rate on the two domains; among close rates, the best on all three.

    Equal rates are all returned: any of them may be used.
    """
    near = close(found)
    means = {lr: mean(found[lr], further=bool(near)) for lr in near or found}
    return [lr for lr, value in means.items() if value == max(means.values())]


def tried(bench: Bench, name: str, domain: str, lr: float) -> dict[str, Any]:
    """Return a row of the search for a kind; for RA it is the A that others start from."""
    method, options = plain(name)
    epochs = EPOCHS if method == "ra" else None
    return bench.cell(method, domain, 0, lr=lr, epochs=epochs, **options)


def plain(name: str) -> tuple[str, dict[str, Any]]:
    """Return the method of a kind, and its options in the search."""
    return OTHERS.get(name, (name, table1.options(name, 1)))


def keys(backbone: str, name: str, lr: float) -> list[dict[str, Any]]:
    """Return the keys of a kind at one rate; a cut ("cut-…", see `metric`) has one per share."""
    if name.startswith("cut-"):
        return [cut(backbone, name.removeprefix("cut-"), s, True, lr) for s in metric.SHARES]
    method, options = plain(name)
    return [start(backbone, lr) if method == "ra" else cell(backbone, method, options, lr=lr)]


def check(bench: Bench, names: Iterable[str]) -> None:
    """Refuse to continue with a rate that the search did not choose.

    The originals use the rates chosen on our domains.
    """
    if bench.folder is not None:
        return
    for name in [n for n in kinds(bench.backbone) if n in names]:
        found = search(bench, name)
        if bench.rate(name) not in best(found):
            rates = " or ".join(f"{lr:g}" for lr in best(found))
            raise SystemExit(
                f"{name} on {bench.backbone}: {rates} validates best ({found}), but settings.RATES "
                f"has {bench.rate(name):g}. Enter the best rate there and run the command again."
            )


def results(rows: Rows, backbone: str) -> list[dict[str, Any]]:
    """Return the search of every kind on a backbone, from its rows: what was tried and the best."""
    names = {k: n for m, n in NAMES.items() for k, n in ((m, n), (m + SMALL, f"{n}, small"))}
    searched = {k: n for k, n in names.items() if k in kinds(backbone)}
    if backbone != "resnet26":
        searched |= {f"cut-{way}": f"cut: {metric.WAYS[way]}" for way in metric.TUNED}
    return [{"name": name, **_result(rows, backbone, kind)} for kind, name in searched.items()]


def _result(rows: Rows, backbone: str, name: str) -> dict[str, Any]:
    is_cut, domains = name.startswith("cut-"), two(backbone)
    asked = domains if is_cut else (*domains, FURTHER)
    keys_at = {lr: keys(backbone, name, lr) for lr in grid(backbone, name)}
    known, undone = {}, {}
    for lr, at_rate in keys_at.items():
        validated, declined = (
            [{d: v[0] for d, v in rows.values(k, field).items() if 0 in v} for k in at_rate]
            for field in ("validation", "declined")
        )
        undone[lr] = [d for d in domains if any(values.get(d) for values in declined)]
        complete = [d for d in asked if all(d in values for values in validated)]
        if {*complete} >= {*domains}:
            known[lr] = {d: statistics.fmean(v[d] for v in validated) for d in complete}
    near = [] if is_cut or not known else close(known)
    decided = len(known) == len(keys_at) and all(FURTHER in known[lr] for lr in near)
    chosen, ends = best(known) if decided else [], {min(keys_at), max(keys_at)}
    return {
        "kind": name,
        "rates": list(keys_at),
        "used": [key for at_rate in keys_at.values() for key in at_rate if rows.of(key)],
        "known": known,
        "near": near,
        "undone": undone,
        "best": chosen,
        "at_end": bool(chosen) and {*chosen} <= ends,
    }
