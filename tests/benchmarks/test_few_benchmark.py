"""The benchmark of few images: its parts, and what its table is made of."""

from __future__ import annotations

import torch

from benchmarks import domains, few
from benchmarks.ledger import Lines
from benchmarks.markers import filled


def made_up() -> list[few.Row]:
    """Two domains and seeds: three runs gain 1 and 3 points on the first, 2 on the second."""
    rows = []
    for domain, gains in {"objects": (1, 3), "digits": (2, 2)}.items():
        for seed, gain in enumerate(gains):
            shared = {"domain": domain, "seed": seed, "linear": 50.0 + seed}
            rows.append({**shared, "runs": 1, "accuracy": 60.0, "seconds": 10.0})
            rows.append({**shared, "runs": 3, "accuracy": 60.0 + gain, "seconds": 15.0})
    return rows


def test_the_table_has_means_over_seeds_and_the_paired_gain():
    text = few.table(made_up())
    assert "| test accuracy % | objects | digits | mean | seconds |" in text
    assert "| linear head | 50.5 | 50.5 | 50.5 | – |" in text
    assert "| one run | 60.0 | 60.0 | 60.0 | 10 |" in text
    assert "| mean of three, half of the epochs each | 62.0 | 62.0 | 62.0 | 15 |" in text
    assert "is +2.0 (95 % interval +2.0 to +2.0) points above one run" in text
    assert "in 0 of 4 cells, the mean of three in 0" in text
    worse = [{**row, "linear": 61.5} for row in made_up()]
    assert "in 4 of 4 cells, the mean of three in 1" in few.table(worse)


def test_the_page_is_made_of_the_rows_in_the_results():
    rows = Lines("few").rows
    page = few.DOCS.read_text()
    assert filled(page, few.BEGIN, few.END, few.table(rows)) == page
    rows[0]["accuracy"] += 5
    assert filled(page, few.BEGIN, few.END, few.table(rows)) != page, "a control"


def test_training_and_test_images_are_disjoint_and_drawn_by_the_seed(monkeypatch):
    n = 300
    x, y = torch.arange(n).view(n, 1, 1, 1).expand(n, 3, 2, 2), torch.arange(n) % 6
    split = domains.Split(
        x[:100], y[:100], x[100:150], y[100:150], x[150:], y[150:], tuple("abcdef")
    )
    monkeypatch.setattr(domains, "load", lambda _: split)
    (train, labels), (test, held) = few.parts("objects", 0)
    assert labels.bincount().tolist() == [20] * 5
    assert len(held) == 5 * 30
    assert set(held.tolist()) == set(range(5))
    assert not {int(i) for i in train[:, 0, 0, 0]} & {int(i) for i in test[:, 0, 0, 0]}
    (again, _), _ = few.parts("objects", 0)
    (other, _), _ = few.parts("objects", 1)
    assert torch.equal(train, again)
    assert not torch.equal(train, other)
