"""What the paper's Table 1 says of two methods, and what ours says."""

from __future__ import annotations

from itertools import combinations

from ..published import TABLE1
from . import stats
from .blocks import Table
from .numbers import NONE
from .rows import NAMES, Rows, said
from .tables import METHODS, key1

# (above, below) in the paper: what it concludes from its table.
PAIRS = (
    ("covnorm", "ra"),
    ("covnorm", "svd-fta"),
    ("covnorm", "fta"),
    ("covnorm-joint", "covnorm"),
    ("covnorm-joint", "joint-svd"),
    ("svd-fta", "fta"),
    ("ra", "fnft"),
    ("ra", "bn"),
)
WORDS = {"above": "reproduced", "below": "reversed"}


def table(found: Rows) -> Table:
    """Of every pair the paper's difference, ours with its interval, and what that says."""
    body = []
    for a, b in PAIRS:
        theirs = stats.signed(TABLE1[a][1] - TABLE1[b][1])
        pair = compared(found, a, b)
        ours = [NONE, NONE, "not run yet"]
        if pair is not None and pair.domains == len(found.domains):
            ends = f"{stats.signed(pair.low)} to {stats.signed(pair.high)}"
            ours = [stats.signed(pair.mean), ends, WORDS.get(pair.verdict, "cannot be told")]
        body.append([f"{NAMES[a]} over {NAMES[b]}", theirs, *ours])
    caption = (
        "Points of mean accuracy that one method is above another. Ours are paired by domain, with "
        "a 95 % interval over the domains and all seeds that both have: reproduced where it lies "
        "above 0, reversed where below; one interval in twenty is off by chance. The paper has one "
        "run of each and no interval."
    )
    head = ["the paper's Table 1", "published", "ours", "95 % interval", ""]
    methods = [m for m in METHODS if any(m in pair for pair in PAIRS)]
    rows_of = [said(key1(found, m)) for m in methods]
    return Table(caption, head, body, "vgg16", rows_of, left=(0, 4))


def compared(found: Rows, a: str, b: str) -> stats.Comparison | None:
    """Two methods of Table 1, paired by domain."""
    of = (found.values(key1(found, m)) for m in (a, b))
    return stats.paired(*of, found.domains)


def pairs_in_order(found: Rows) -> dict[tuple[str, str], stats.Comparison]:
    """{(above, below) in the paper: ours} of every two methods that have all domains here."""
    methods = sorted((m for m in METHODS if m in TABLE1), key=lambda m: -TABLE1[m][1])
    made = {(a, b): compared(found, a, b) for a, b in combinations(methods, 2)}
    return {k: p for k, p in made.items() if p is not None and p.domains == len(found.domains)}
