"""The numbers in the docs are those of the results that they name."""

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
# Where each number stands: pages that move, and sentences that are reworded, change only here.
PAGES = {
    "demo": "README.md",
    "server in short": "README.md",
    "methods": "docs/numbers.md",
    "speed": "docs/numbers.md",
    "recipe": "docs/numbers.md",
    "guessing": "docs/serving.md",
    "server": "docs/serving.md",
    "smallest file": "docs/methods.md",
}
SERVER = (  # about the server's promises; {…} are the measured numbers
    "cost {one:.2f} of one",
    "answered {models:.1f} times as fast",
    "takes {memory:.0f} MB, {growth:.2f} times that with one, {memory_of_one:.0f} MB",
    "within {slowest:.2f} s of the 2 s",
    "{refused} of the requests got 429",
    "them within {refusal:.2f} s",
)
SERVER_IN_SHORT = (
    "32 domains at once at {one:.2f} of the throughput of one, {models:.0f} times that of"
)
SMALLEST_FILE = "have {loss} on the mean, against {variance} in the metric of the variance"
RECIPE = "ships {total:,} parameters, {share}"
MODES = {
    "one domain alone": "identical",
    "uniform": "uniform",
    "skewed": "skewed",
    "each in turn": "distinct",
}
SYSTEMS = ("mixed", "one-domain", "models")


def page(name: str) -> str:
    return " ".join((ROOT / PAGES[name]).read_text().split("\n"))


def table(name: str, head: str) -> list[list[str]]:
    """Return the cells below this first cell, of all tables on the page that have it."""
    lines, found = (ROOT / PAGES[name]).read_text().splitlines(), []
    for i, line in enumerate(lines):
        if line.startswith(f"| {head} |"):
            for row in lines[i + 2 :]:
                if not row.startswith("|"):
                    break
                found.append([cell.strip() for cell in row.strip("|").split("|")])
    assert found, f"{PAGES[name]} has no table that starts with {head!r}"
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
    assert table("methods", "method") == made


def test_how_well_a_domain_is_guessed_is_as_measured():
    found = json.loads((RESULTS / "guessing.json").read_text())
    fields = ("right", "refused", "refused_without_it")
    made = [[name, *(f"{row[f]:.1f} %" for f in fields)] for name, row in found.items()]
    assert table("guessing", "domain") == made


def test_what_the_server_does_under_load_is_as_measured():
    found = {(r["domains"], r["mode"], r["system"]): r for r in rows("serving.jsonl")}
    for domains, mode, *cells in table("server", "domains"):
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
    few, all_ = (found[n, m, "mixed"]["memory"] for n, m in ((1, "identical"), (256, "distinct")))
    over = many["loads"]["3x"]
    refused = over["statuses"]["429"] / sum(over["statuses"].values())
    measured = {
        "one": many["rate"] / found[32, "identical", "mixed"]["rate"],
        "models": many["rate"] / found[32, "uniform", "models"]["rate"],
        "memory": all_ / 1e6,
        "growth": all_ / few,
        "memory_of_one": few / 1e6,
        "slowest": over["inside_p99"] / 1e3,
        "refused": f"{refused:.0%}".replace("%", " %"),
        "refusal": over["refused_p99"] / 1e3,
    }
    for sentence in SERVER:
        assert sentence.format(**measured) in page("server"), sentence


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
    for what, measured, _ in table("speed", "what"):
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
    assert SMALLEST_FILE.format(**kb) in page("smallest file")


def test_the_demo_printed_what_the_readme_shows():
    found = json.loads((RESULTS / "demo.json").read_text())
    lines = {name: cells for name, *cells in table("demo", "test accuracy %")}
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
    assert table("recipe", "stage") == made
    total = list(found.values())[-1]["total"]
    share = f"{total / whole:.2%}".replace("%", " %")
    assert RECIPE.format(total=total, share=share) in page("recipe")


def test_the_readme_says_of_the_server_what_was_measured():
    found = {(r["domains"], r["mode"], r["system"]): r for r in rows("serving.jsonl")}
    many = found[32, "uniform", "mixed"]["rate"]
    one, models = (
        many / found[32, mode, system]["rate"]
        for mode, system in (("identical", "mixed"), ("uniform", "models"))
    )
    assert SERVER_IN_SHORT.format(one=one, models=models) in page("server in short")


@pytest.mark.parametrize(
    ("name", "old", "new", "test"),
    [
        (
            "methods",
            "| 83.6 % |",
            "| 83.7 % |",
            "test_the_tables_of_methods_are_made_of_their_rows",
        ),
        ("recipe", "94.2 %", "94.3 %", "test_the_recipe_printed_what_the_docs_show"),
        ("speed", "11.0)", "11.1)", "test_speeds_are_as_measured"),
        ("guessing", "97.5 %", "97.4 %", "test_how_well_a_domain_is_guessed_is_as_measured"),
        (
            "server",
            "64, 166",
            "64, 165",
            "test_what_the_server_does_under_load_is_as_measured",
        ),
        (
            "smallest file",
            "226 kB",
            "227 kB",
            "test_the_sizes_that_decide_the_default_are_as_measured",
        ),
        ("server", "1.28 s", "1.27 s", "test_what_the_server_promises_is_as_measured"),
        ("demo", "| 96.2 |", "| 96.3 |", "test_the_demo_printed_what_the_readme_shows"),
        ("demo", "34.1 %", "34.2 %", "test_the_demo_printed_what_the_readme_shows"),
        ("demo", "274 kB", "275 kB", "test_the_demo_printed_what_the_readme_shows"),
        (
            "server in short",
            "0.84 of",
            "0.85 of",
            "test_the_readme_says_of_the_server_what_was_measured",
        ),
    ],
)
def test_control_another_number_is_seen(name, old, new, test, tmp_path, monkeypatch):
    text = (ROOT / PAGES[name]).read_text()
    assert old in text
    file = tmp_path / PAGES[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.replace(old, new, 1))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        globals()[test]()
