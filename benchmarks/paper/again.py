"""Cells that are run once more with the same seed: the accuracy must be the same."""

from __future__ import annotations

from typing import Any

from . import table1
from .bench import Bench

DOMAIN, SEED, METHODS = "faces", 0, ("ra", "covnorm")  # the smallest domain


def key(bench: Bench, method: str, domain: str = DOMAIN) -> dict[str, Any]:
    """What the row of a repetition is found by."""
    return {**bench.where(domain, SEED), "method": "again", "of": method}


def run(bench: Bench) -> None:
    """Each of the cells, in the file and anew."""
    domain = bench.domains[-1] if bench.folder else DOMAIN
    for method in METHODS:
        found = key(bench, method, domain)
        if bench.lines.find(**found):
            continue
        options = table1.OPTIONS.get(method, {})
        first = bench.cell(method, domain, SEED, **options)
        second = bench.cell(method, domain, SEED, again=True, **options)
        measured = {k: second[k] for k in ("accuracy", "validation", "parameters", "seconds")}
        bench.lines.add({**found, **measured, "first": first["accuracy"]})
        same = second["accuracy"] == first["accuracy"]
        print("…", *found.values(), first["accuracy"], second["accuracy"], flush=True)
        if not same:
            raise SystemExit(f"{method} on {domain}: {first['accuracy']}, then another accuracy")
