"""The learning rate of every kind: the best of three or more on validation, two domains, one seed.

Where the best of three is at their end, further ones are tried. Where the two domains tell rates
apart by less than half a point, a third one is asked as well. A kind is a method, or CovNorm by
what else M starts as, at the size that Table 1 has it; those of the figure again at a small size.
The same search for all of them; the choice is written down in `settings.RATES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from . import parameters, table1, table2
from .bench import Bench
from .settings import EPOCHS, LIKE, kind
from .settings import rates as grid

SEARCH = parameters.DOMAINS
FURTHER, TIE = "drawings", 0.5  # who is asked where less than so many points decide
# The curves of the figure once more where they are small.
SMALLER: dict[str, dict[str, Any]] = {
    "covnorm": {"variance": parameters.START_THRESHOLDS[0]},
    "svd-fta": {"rank": 1 / 32},
    "fta": {"rank": 1 / 32},
    "pca-fta": {"ratio": 1 / 32},
}
# What is searched beside Table 1, also CovNorm by what else M starts as: {kind: (method, options)}.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    kind(method, options): (method, options)
    for method, options in (
        *(("covnorm", start) for start in parameters.starts() if "M" in start),
        *SMALLER.items(),
    )
}


def kinds(backbone: str) -> list[str]:
    """What is searched on a backbone, beside the cuts of `metric`."""
    methods = {
        "vgg16": (*table1.SEVERAL, *table1.ONE, *OTHERS),
        "efficientnet-lite0": ("ra",),
        "resnet26": table2.METHODS,
    }
    return [name for name in methods[backbone] if name not in LIKE and name != "svd"]


def run(bench: Bench) -> None:
    """Every kind of a backbone at every rate."""
    for name in kinds(bench.backbone):
        search(bench, name)


def two(backbone: str) -> tuple[str, ...]:
    """The domains of the search: others than what the backbone was trained on."""
    return ("products", "sketches") if backbone == "resnet26" else SEARCH


def search(bench: Bench, name: str) -> dict[float, dict[str, float]]:
    """{rate: {domain: validation}} of a kind; of the third domain where the two cannot tell."""

    def validation(domain: str, lr: float) -> float:
        return float(tried(bench, name, domain, lr)["validation"])

    of = two(bench.backbone)
    found = {lr: {d: validation(d, lr) for d in of} for lr in grid(bench.backbone, name)}
    for lr in close(found):
        found[lr][FURTHER] = validation(FURTHER, lr)
    return found


def mean(values: Mapping[str, float], further: bool = False) -> float:
    """Of the two domains, or of all three."""
    return statistics.fmean(v for d, v in values.items() if further or d != FURTHER)


def close(found: Mapping[float, Mapping[str, float]]) -> list[float]:
    """The rates that the two domains cannot tell from the best one; none if it stands alone."""
    means = {lr: mean(values) for lr, values in found.items()}
    near = [lr for lr, value in means.items() if value > max(means.values()) - TIE]
    return near if len(near) > 1 else []


def best(found: Mapping[float, Mapping[str, float]]) -> list[float]:
    """The best on the two domains; of those that are close to it, the best on all three.

    More than one where they are equal: then one of them is as good as another.
    """
    near = close(found)
    means = {lr: mean(found[lr], further=bool(near)) for lr in near or found}
    return [lr for lr, value in means.items() if value == max(means.values())]


def tried(bench: Bench, name: str, domain: str, lr: float) -> dict[str, Any]:
    """A row of the search for a kind; of RA it is the A that others start from."""
    method, options = plain(name)
    epochs = EPOCHS if method == "ra" else None
    return bench.cell(method, domain, 0, lr=lr, epochs=epochs, **options)


def plain(name: str) -> tuple[str, dict[str, Any]]:
    """The method of a kind, and its options in the search."""
    return OTHERS.get(name, (name, table1.options(name, 1)))


def check(bench: Bench, names: Iterable[str]) -> None:
    """Refuse to go on with a rate that the search did not choose.

    The originals take what was chosen on our domains.
    """
    if bench.folder is not None:
        return
    for name in [n for n in kinds(bench.backbone) if n in names]:
        found = search(bench, name)
        if bench.rate(name) not in best(found):
            rates = " or ".join(f"{lr:g}" for lr in best(found))
            raise SystemExit(
                f"{name} on {bench.backbone}: {rates} validates best ({found}), "
                f"and settings.RATES says {bench.rate(name):g}: write it there, and go on"
            )
