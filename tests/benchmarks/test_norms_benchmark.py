"""The benchmark of norms: which rate is chosen, and what its tables are made of."""

from __future__ import annotations

import pytest

from benchmarks import norms
from torch_covnorm.errors import CovNormError

ACCURACY = {"shared": 80.0, "sites": 79.0, "own": 78.0}


def row(system, kind, domain, seed, lr, accuracy, validation) -> norms.Row:
    key = {"system": system, "norms": kind, "domain": domain, "seed": seed, "lr": lr}
    return {**key, "accuracy": accuracy, "validation": validation, "bytes": 50_000}


def made_up() -> list[norms.Row]:
    """Two domains and seeds; 1e-3 validates best with seed 0, though another rate tests better."""
    rows = []
    for system in norms.SYSTEMS:
        for kind, accuracy in ACCURACY.items():
            for i, domain in enumerate(("a", "b")):
                for lr in norms.RATES[system]:
                    good = lr == 1e-3
                    found = accuracy + i if good else 99.0
                    rows.append(row(system, kind, domain, 0, lr, found, 70.0 if good else 60.0))
                rows.append(row(system, kind, domain, 1, 1e-3, accuracy + i + 1, 10.0))
    return rows


def test_the_rate_is_the_one_that_validates_best_with_seed_0():
    rows = made_up()
    assert norms.best_rate(rows, "ra", "shared") == 1e-3
    # Controls: neither test accuracy nor another seed chooses.
    later = [row("ra", "shared", "a", 1, 3e-3, 99.0, 99.0)]
    assert norms.best_rate(rows + later, "ra", "shared") == 1e-3
    first = [row("ra", "shared", d, 0, 3e-3, 99.0, 99.0) for d in ("a", "b")]
    assert norms.best_rate(rows + first, "ra", "shared") == 3e-3
    assert norms.best_rate([], "ra", "shared") is None


def test_means_and_differences_are_of_the_best_rate():
    rows = made_up()
    assert norms.values(rows, "1/8", "own") == {"a": {0: 78.0, 1: 79.0}, "b": {0: 79.0, 1: 80.0}}
    text = norms.tables(rows)
    assert "| none (`shared`) | 81.0 ± 0.7 (0.001) |" in text
    assert "| `shared` − `own` | +2.0 (+2.0 to +2.0) |" in text
    assert "99.0" not in text


def test_what_was_not_run_is_not_in_the_table():
    text = norms.tables([])
    assert "–" in text
    assert "0.0" not in text


def test_the_tables_go_between_the_markers():
    page = f"before\n{norms.BEGIN}\nold\n{norms.END}\nafter {norms.END}"
    found = norms.render(page, made_up())
    assert found.startswith(f"before\n{norms.BEGIN}\n\n| norms")
    assert found.endswith(f"{norms.END}\nafter {norms.END}")
    assert "old" not in found
    with pytest.raises(CovNormError, match="has no lines"):
        norms.render("nothing", [])
