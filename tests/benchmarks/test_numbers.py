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
from torch_covnorm.backbones import EfficientNetLite0

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODES = {
    "one domain alone": "identical",
    "uniform": "uniform",
    "skewed": "skewed",
    "each in turn": "distinct",
}
SYSTEMS = ("mixed", "one-domain", "models")


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split("\n"))


def table(name: str, head: str) -> list[list[str]]:
    """The cells of the table below that first cell, of all tables that have it."""
    lines, found = (ROOT / name).read_text().splitlines(), []
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
    assert table("docs/numbers.md", "method") == made


def test_how_well_a_domain_is_guessed_is_as_measured():
    found = json.loads((RESULTS / "guessing.json").read_text())
    fields = ("right", "refused", "refused_without_it")
    made = [[name, *(f"{row[f]:.1f} %" for f in fields)] for name, row in found.items()]
    assert table("docs/numbers.md", "domain") == made


def test_what_the_server_does_under_load_is_as_measured():
    found = {(r["domains"], r["mode"], r["system"]): r for r in rows("serving.jsonl")}
    for domains, mode, *cells in table("docs/numbers.md", "domains"):
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
        assert said in page("docs/numbers.md"), said


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
    for what, measured, _ in table("docs/numbers.md", "what"):
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
    assert said in page("docs/numbers.md")


def test_the_demo_printed_what_the_docs_show():
    found = json.loads((RESULTS / "demo.json").read_text())
    lines = {name: cells for name, *cells in table("docs/numbers.md", "test accuracy %")}
    for task, accuracies in found["tasks"].items():
        assert lines[task] == [f"{value:.1f}" for value in accuracies.values()], task
    rows, network = found["rows"], sum(p.numel() for p in EfficientNetLite0().parameters())
    assert lines["**mean**"] == [f"**{row['accuracy']:.1f}**" for row in rows]
    shares = {
        "adapter parameters, of RA's": ("of_ra", 1),
        f"adapter parameters, of the network's {network:,}": ("of_network", 2),
    }
    for name, (field, digits) in shares.items():
        once = rows[1][field] * found["shared"] / rows[1]["adapter"]
        *alone, joint = (numbers(cell) for cell in lines[name])
        said = [f"{row[field]:.{digits}f}" for row in rows]
        assert [float(cell[0]) for cell in alone] == [float(value) for value in said[:-1]], name
        assert joint[0] == said[-1]
        assert float(joint[1]) == pytest.approx(once, rel=0.01)
    stored = [row["bytes"] for row in rows if row["bytes"]]
    cells = lines["file in float16, with norms, head and record"][1:]
    assert [numbers(cell)[0] for cell in cells] == [f"{size / 1e3:.0f}" for size in stored]
    cells = next(c for name, c in lines.items() if name.startswith("of the network's"))[1:]
    for cell, row in zip(cells, rows[1:], strict=True):
        said = numbers(cell)[0]
        digits = len(said.partition(".")[2])
        assert said == f"{row['of_bytes']:.{digits}f}"


def test_the_demo_printed_the_three_rows_of_the_readme():
    found = json.loads((RESULTS / "demo.json").read_text())["rows"]
    bare, ra, covnorm = (
        cells for _, *cells in table("README.md", "four tasks on one EfficientNet-Lite0")
    )
    assert bare == [f"{found[0]['accuracy']:.1f}", "–", "–", "–"]
    for cells, row in zip((ra, covnorm), found[1:3], strict=True):
        assert numbers(" ".join(cells)) == [
            f"{row['accuracy']:.1f}",
            "100" if row["name"] == "RA" else f"{row['of_ra']:.1f}",
            f"{row['bytes'] / 1e3:.0f}",
            f"{row['of_bytes']:.2f}",
        ]


def test_the_recipe_printed_what_the_docs_show():
    found = json.loads((RESULTS / "recipe.json").read_text())
    whole = sum(p.numel() for p in EfficientNetLite0().parameters())
    a = next(iter(found.values()))["adapter"]
    made = [
        [
            stage,
            f"{row['accuracy']:.1f} %",
            f"{row['adapter']:,}",
            "100 %" if row["adapter"] == a else f"{row['adapter'] / a:.1%}".replace("%", " %"),
            f"{row['adapter'] / whole:.2%}".replace("%", " %"),
        ]
        for stage, row in found.items()
    ]
    assert table("docs/numbers.md", "stage") == made
    total = list(found.values())[-1]["total"]
    said = f"ships {total:,} parameters, {total / whole:.2%}".replace("%", " %")
    assert said in page("docs/numbers.md")


def test_the_readme_says_of_the_server_what_was_measured():
    found = {(r["domains"], r["mode"], r["system"]): r for r in rows("serving.jsonl")}
    many = found[32, "uniform", "mixed"]["rate"]
    one, models = (
        many / found[32, mode, system]["rate"]
        for mode, system in (("identical", "mixed"), ("uniform", "models"))
    )
    said = f"32 domains at once at {one:.2f} of the throughput of one, {models:.0f} times that of"
    assert said in page("README.md")


@pytest.mark.parametrize(
    ("name", "old", "new", "test"),
    [
        (
            "docs/numbers.md",
            "| 83.6 % |",
            "| 83.7 % |",
            "test_the_tables_of_methods_are_made_of_their_rows",
        ),
        ("docs/numbers.md", "94.2 %", "94.3 %", "test_the_recipe_printed_what_the_docs_show"),
        ("docs/numbers.md", "11.0)", "11.1)", "test_speeds_are_as_measured"),
        ("docs/numbers.md", "97.5 %", "97.4 %", "test_how_well_a_domain_is_guessed_is_as_measured"),
        (
            "docs/numbers.md",
            "64, 166",
            "64, 165",
            "test_what_the_server_does_under_load_is_as_measured",
        ),
        (
            "docs/numbers.md",
            "226 kB",
            "227 kB",
            "test_the_sizes_that_decide_the_default_are_as_measured",
        ),
        ("docs/numbers.md", "1.28 s", "1.27 s", "test_what_the_server_promises_is_as_measured"),
        ("docs/numbers.md", "| 96.4 |", "| 96.5 |", "test_the_demo_printed_what_the_docs_show"),
        ("docs/numbers.md", "26.4 %", "26.5 %", "test_the_demo_printed_what_the_docs_show"),
        ("docs/numbers.md", "146 kB", "147 kB", "test_the_demo_printed_what_the_docs_show"),
        ("README.md", "143 kB", "144 kB", "test_the_demo_printed_the_three_rows_of_the_readme"),
        ("README.md", "0.84 of", "0.85 of", "test_the_readme_says_of_the_server_what_was_measured"),
    ],
)
def test_control_another_number_is_seen(name, old, new, test, tmp_path, monkeypatch):
    text = (ROOT / name).read_text()
    assert old in text
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text.replace(old, new, 1))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        globals()[test]()
