"""The strangers' tables and verdicts: made of the rows, and right."""

from __future__ import annotations

import copy
import json
import math
import re

import pytest

pytest.importorskip("matplotlib")

from benchmarks.strangers import page, statistics
from benchmarks.strangers.cells import METHODS, _row
from benchmarks.strangers.statistics import PLANNED
from torch_covnorm import CovNormError

RESULTS = page.DOCS.parents[1] / "benchmarks" / "results" / "strangers.jsonl"


def row(method: str, cell: tuple[str, int], correct: str, **others) -> dict:
    accuracy = 100 * correct.count("1") / len(correct)
    key = {"method": method, "domain": cell[0], "size": cell[1], "backbone": "net", "seed": 0}
    cost = {"bytes": 1000, "cpu_seconds": 9.0, "seconds": 10.0, "lines": 20, "parameters": 5}
    about = {"accuracy": accuracy, "n": len(correct), "correct": correct}
    return {**key, **cost, **about, **others}


def made_up(**correct: str) -> list[dict]:
    """Every cell of every method; ours has files of a tenth and the probe's answers by default."""
    answers = dict.fromkeys(METHODS, "1110" * 5) | correct
    size = {"covnorm": 100}
    return [row(m, c, answers[m], bytes=size.get(m, 1000)) for m in METHODS for c in PLANNED]


def judged(rows: list[dict]) -> list[str]:
    """The word of each verdict, in order."""
    lines = page.verdicts(statistics.by_method(rows, "net"))
    return [re.search(r"\*\*(\w+)\*\*|not run yet", line)[0].strip("*") for line in lines]


# ── the committed page ───────────────────────────────────────────────────────────────────────


def test_the_page_is_made_of_the_rows_in_the_results():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    text = page.DOCS.read_text()
    assert page.render(text, rows) == text
    # A control: one answer more, and another page.
    other = copy.deepcopy(rows)
    other[0]["accuracy"] += 5
    assert page.render(text, other) != text


def test_the_readme_shows_the_means_of_the_page():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    found = statistics.by_method(rows, "efficientnet-lite0")
    readme = (page.DOCS.parents[1] / "README.md").read_text()

    def line(name: str, numbers: list[str]) -> str:
        return f"| {name} | {' | '.join(numbers)} |"

    means = [f"{page.mean(found, m):.1f}" for m in METHODS]
    sizes = [f"{page.kilobytes(found, m):,.0f}" for m in METHODS]
    seconds = [
        f"{page.total(found, m, 'seconds') / len(statistics.common(found)):.0f}" for m in METHODS
    ]
    assert line("mean test accuracy %", means) in readme
    assert line("kilobytes per task", sizes) in readme
    assert line("seconds on two cores", seconds) in readme
    assert line("mean test accuracy %", means[::-1]) not in readme, "a control"


def test_every_row_is_about_the_same_test_images():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert all(len(r["correct"]) == r["n"] for r in rows)
    assert all(set(r["correct"]) <= {"0", "1"} for r in rows)
    numbers = {(r["domain"], r["n"]) for r in rows}
    assert len(numbers) == len({r["domain"] for r in rows})


def test_markers_are_needed():
    with pytest.raises(CovNormError, match="Restore them"):
        page.render("no markers", [])


# ── numbers worked out by hand ───────────────────────────────────────────────────────────────


def test_errors():
    assert statistics.error(row("probe", PLANNED[0], "1110")) == pytest.approx(100 * 0.75**0.5 / 4)
    a, b = (row(m, PLANNED[0], c) for m, c in (("covnorm", "1100"), ("probe", "1011")))
    # Differences 0, 1, −1, −1: mean −1/4, variance (3/4 − 1/16) · 4/3.
    mean, off = statistics.paired(a, b)
    assert mean == pytest.approx(-25)
    assert off == pytest.approx(100 * math.sqrt((3 / 4 - 1 / 16) / 3))


def test_a_difference_is_a_mean_over_cells_with_an_interval_around_it():
    cells = [("letters", 20), ("letters", 50), ("icons", 20)]
    ours = dict(zip(cells, (row("covnorm", c, "1" * 40) for c in cells), strict=True))
    same = statistics.difference(ours, ours, cells)
    assert same == (0, 0, 0)
    worse = dict(zip(cells, (row("probe", c, "10" * 20) for c in cells), strict=True))
    found = statistics.difference(ours, worse, cells)
    assert found.mean == pytest.approx(50)
    assert 30 < found.low < 50 < found.high < 70
    worse[cells[2]] = ours[cells[2]]  # now the data sets differ: 50 points or none
    wide = statistics.difference(ours, worse, cells)
    assert wide.mean == pytest.approx(100 / 3)
    assert wide.low == 0
    assert wide.high > 45
    assert statistics.difference(ours, worse, []) is None


def test_answers_are_ordered_by_file():
    found = {"files": ["test/b/0.png", "test/a/1.png", "test/a/0.png"], "correct": "011"}
    assert _row(found, {"seconds": 1.0})["correct"] == "110"
    assert _row({"files": ["b", "a"], "correct": "01"}, {})["accuracy"] == 50


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_judged_before_every_cell_is_run():
    assert judged([]) == ["not run yet"] * 4
    assert judged(made_up()) == ["met"] * 4
    rows = made_up()
    assert judged([r for r in rows if r["method"] != "lora"]) == [
        *("met", "not run yet", "not run yet", "met")
    ]
    assert judged(rows[1:]) == ["not run yet"] * 4


def test_a_verdict_turns_with_the_numbers():
    assert judged(made_up(covnorm="1000" * 5)) == ["missed", "missed", "met", "met"]
    # The probe's error is 100 · √(3/4 · 1/4 / 20) = 9.7 points: one image less is 5, two are 10.
    assert judged(made_up(covnorm="1110" * 4 + "1100"))[0] == "met"
    assert judged(made_up(covnorm="1110" * 4 + "1000"))[0] == "missed"
    assert judged(made_up(finetune="1111" * 5)) == ["met", "missed", "met", "met"]
    rows = made_up()
    large = [r | {"bytes": 201} if r["method"] == "covnorm" else r for r in rows]
    assert judged(large) == ["met", "met", "missed", "met"]
    slow = [r | {"seconds": 15.1} if r["method"] == "covnorm" else r for r in rows]
    assert judged(slow) == ["met", "met", "met", "missed"]


def test_one_bad_cell_is_named():
    rows = made_up()
    cell = next(
        r for r in rows if (r["method"], r["domain"], r["size"]) == ("covnorm", "icons", 50)
    )
    cell.update(row("covnorm", ("icons", 50), "0" * 20))
    text = page.tables(rows)
    assert "below in icons at 50 (−75.0); by more than the error of the paired" in text
    assert "difference in 1." in text


def test_means_are_over_the_cells_that_all_methods_have():
    rows = [r for r in made_up() if r["method"] != "covnorm"]
    rows = [r for r in rows if (r["method"], r["size"]) != ("lora", 200)]
    for r in rows:
        if r["size"] == 200:
            r["accuracy"] = 0.0
    found = statistics.by_method(rows, "net")
    assert page.mean(found, "probe") == 75
    assert page.mean(found, "covnorm") is None
