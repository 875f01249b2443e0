"""The numbers of the docs are those of the results that they name."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import methods
from benchmarks.ledger import Lines
from benchmarks.paper import smallest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODES = {
    "one domain alone": "identical",
    "uniform": "uniform",
    "skewed": "skewed",
    "each in turn": "distinct",
}
SYSTEMS = ("mixed", "one-domain", "models")


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text().split("\n"))


def table(name: str, head: str) -> list[list[str]]:
    """The cells of the table below that first cell, of all tables that have it."""
    lines, found = (ROOT / "docs" / name).read_text().splitlines(), []
    for i, line in enumerate(lines):
        if line.startswith(f"| {head} |"):
            for row in lines[i + 2 :]:
                if not row.startswith("|"):
                    break
                found.append([cell.strip() for cell in row.strip("|").split("|")])
    assert found, f"{name} has no table of {head}"
    return found


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


def test_the_tables_of_methods_are_made_of_their_rows():
    lines = Lines("methods")
    made = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for backbone in ("efficientnet-lite0", "vgg16")
        for line in methods.table(lines, backbone).splitlines()[2:]
    ]
    assert table("numbers.md", "method") == made


def test_how_well_a_domain_is_guessed_is_as_measured():
    found = json.loads((RESULTS / "guessing.json").read_text())
    fields = ("right", "refused", "refused_without_it")
    made = [[name, *(f"{row[f]:.1f} %" for f in fields)] for name, row in found.items()]
    assert table("serving.md", "domain") == made


def test_what_the_server_does_under_load_is_as_measured():
    found = {(r["domains"], r["mode"], r["system"]): r for r in rows("serving.jsonl")}
    for domains, mode, *cells in table("serving.md", "domains"):
        for system, cell in zip(SYSTEMS, cells, strict=True):
            row = found.get((int(domains), MODES[mode.partition(" (")[0]], system))
            if row is None:
                assert cell == "–"
                continue
            late = [row["loads"]["steady"][p] for p in ("p50", "p99")] if row["loads"] else []
            said = numbers(re.sub(r"p\d\d", "", cell))
            assert said == [f"{v:.0f}" for v in (row["rate"], *late)], (domains, mode, system)


def test_what_the_server_promises_is_as_measured():
    found = {(r["domains"], r["mode"], r["system"]): r for r in rows("serving.jsonl")}
    many = found[32, "uniform", "mixed"]
    apart = {
        "one": many["rate"] / found[32, "identical", "mixed"]["rate"],
        "models": many["rate"] / found[32, "uniform", "models"]["rate"],
    }
    few, all_ = (found[n, m, "mixed"]["memory"] for n, m in ((1, "identical"), (256, "distinct")))
    over = many["loads"]["3x"]
    asked = sum(over["statuses"].values())
    for said in (
        f"cost {apart['one']:.2f} of one",
        f"answered {apart['models']:.1f} times as fast",
        f"takes {all_ / 1e6:.0f} MB, {all_ / few:.2f} times that with one, {few / 1e6:.0f} MB",
        f"within {over['inside_p99'] / 1e3:.2f} s of the 2 s",
        f"{over['statuses']['429'] / asked:.0%}".replace("%", " %") + " of the requests got 429",
        f"them within {over['refused_p99'] / 1e3:.2f} s",
    ):
        assert said in page("serving.md"), said


SPEED = {  # what a row of the table of speeds is made of: entries, field, digits
    "`Moments.update` /": ([f"moments / matmul, d={d}" for d in (64, 128, 256, 512)], "ratio", 2),
    "the same, features": ([f"moments / matmul, d={d}" for d in (64, 128, 256, 512)], "shifted", 2),
    "`Moments` / scikit": (
        [f"moments / IncrementalPCA, d={d}" for d in (64, 128, 256, 512)],
        "ratio",
        0,
    ),
    "switching domain": ([f"switching, {n} domains" for n in (10, 1000, 10000)], "microseconds", 0),
    "VGG16 at 64 px": (["vgg16 at 64 px: adapted / bare"], "ratio", 2),
    "VGG16: merged": (["vgg16 at 64 px: adapted / bare"], "merged", 2),
    "VGG16: 32 samples": (["vgg16 at 64 px: 32 domains / one"], "ratio", 2),
    "EfficientNet-Lite0 at 72": (["efficientnet-lite0 at 72 px: adapted / bare"], "ratio", 2),
    "EfficientNet-Lite0: merged": (["efficientnet-lite0 at 72 px: adapted / bare"], "merged", 2),
    "EfficientNet-Lite0: 32": (["efficientnet-lite0 at 72 px: 32 domains / one"], "ratio", 2),
}


def test_speeds_are_as_measured():
    found, seen = json.loads((RESULTS / "core.json").read_text()), set()
    for what, measured, _ in table("numbers.md", "what"):
        start = next(s for s in SPEED if what.startswith(s))
        entries, field, digits = SPEED[start]
        made = [f"{found[e][field]:.{digits}f}" for e in entries]
        if loop := found[entries[0]].get("loop_over_domains"):
            made.append(f"{loop:.1f}")
        assert numbers(measured) == made, what
        seen.add(start)
    assert seen == set(SPEED)


def test_the_sizes_that_decide_the_default_are_as_measured():
    kept: dict[str, list[int]] = {metric: [] for metric in smallest.METRICS}
    for r in rows("paper.jsonl"):
        for metric, sizes in kept.items():
            if r["backbone"] == "efficientnet-lite0" and r.get("options") == smallest.options(
                metric
            ):
                sizes.append(r["bytes"])
    kb = {metric: f"{statistics.fmean(sizes) / 1e3:.0f} kB" for metric, sizes in kept.items()}
    said = f"have {kb['loss']} on the mean, against {kb['variance']} in the metric of the variance"
    assert said in page("methods.md")


@pytest.mark.parametrize(
    ("name", "old", "new", "test"),
    [
        (
            "numbers.md",
            "| 83.6 % |",
            "| 83.7 % |",
            "test_the_tables_of_methods_are_made_of_their_rows",
        ),
        ("numbers.md", "11.0)", "11.1)", "test_speeds_are_as_measured"),
        ("serving.md", "97.5 %", "97.4 %", "test_how_well_a_domain_is_guessed_is_as_measured"),
        ("serving.md", "64, 166", "64, 165", "test_what_the_server_does_under_load_is_as_measured"),
        (
            "methods.md",
            "226 kB",
            "227 kB",
            "test_the_sizes_that_decide_the_default_are_as_measured",
        ),
        ("serving.md", "1.28 s", "1.27 s", "test_what_the_server_promises_is_as_measured"),
    ],
)
def test_control_another_number_is_seen(name, old, new, test, tmp_path, monkeypatch):
    text = (ROOT / "docs" / name).read_text()
    assert old in text
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / name).write_text(text.replace(old, new, 1))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        globals()[test]()
