"""Cells that are run twice with the same seed: the accuracy must be the same."""

from __future__ import annotations

from typing import Any

from ..ledger import cpu
from . import table1
from .bench import Bench

DOMAIN, SEED, METHODS = "faces", 0, ("ra", "covnorm")  # the smallest domain


def key(bench: Bench, method: str, domain: str) -> dict[str, Any]:
    """Return the key of a repetition's row."""
    return {**bench.where(domain, SEED), "method": "again", "of": method}


def run(bench: Bench) -> None:
    """Run each cell again and compare it with its first run."""
    domain = bench.domains[-1] if bench.folder else DOMAIN
    for method in METHODS:
        found = key(bench, method, domain)
        row = bench.lines.find(**found)
        if row is None:
            options = table1.options(method, 1)
            first = bench.cell(method, domain, SEED, **options)
            if first.get("cpu") != cpu():  # from another machine: a seed repeats only on one
                first = bench.cell(method, domain, SEED, again=True, **options)
            second = bench.cell(method, domain, SEED, again=True, **options)
            measured = {k: second[k] for k in ("accuracy", "validation", "parameters", "seconds")}
            row = bench.lines.add({**found, **measured, "first": first["accuracy"]})
            print("…", *found.values(), row["first"], row["accuracy"], flush=True)
        if row["accuracy"] != row["first"]:
            where = f"{method} on {domain}, {bench.backbone}"
            raise SystemExit(f"{where}: {row['first']}, then {row['accuracy']} with the same seed")
