"""The page of results: made of the rows, and sound."""

from __future__ import annotations

import copy
import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from result_rows import cells_of, full, made_up, row

import torch_covnorm as cn
from benchmarks import readers
from benchmarks.domains import SIZES
from benchmarks.ledger import cpu
from benchmarks.paper import again, metric, parameters, rates, settings, table1
from benchmarks.paper.keys import cell, cut, start
from benchmarks.paper.neighbours import CUTS
from benchmarks.paper.page import DOCS, render, section, tables
from benchmarks.paper.published import NAMES
from benchmarks.paper.rows import Rows
from benchmarks.paper.settings import PIXELS, RATES
from torch_covnorm.backbones import preprocessing_of

README = Path(__file__).parents[2] / "README.md"
RESULTS = README.parent / "benchmarks" / "results" / "paper.jsonl"

# ── the committed page ───────────────────────────────────────────────────────────────────────


def committed() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


COLUMNS = "| mean test accuracy % | published, other data | here | adapter parameters, of RA's |"


def table_in_readme(text: str) -> list[list[str]]:
    """The lines of the table with these columns, wherever it stands."""
    lines = text.splitlines()
    below = lines[lines.index(COLUMNS) + 2 :]
    table = itertools.takewhile(lambda line: line.startswith("|"), below)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def as_in_readme(rows: list[dict]) -> list[list[str]]:
    """Name, published and own mean, and size of the methods with several seeds."""
    text = section("table1", Rows(rows))
    made = [cells_of(text, NAMES[m]) for m in tables.METHODS if m in table1.SEVERAL]
    return [[name, published, mean, size] for name, *_, mean, published, size, _ in made]


def test_the_table_in_the_readme_is_made_of_the_rows_in_the_results():
    text = README.read_text()
    assert table_in_readme(text) == as_in_readme(committed())
    # A control: one accuracy less, and another number in the table.
    other = copy.deepcopy(committed())
    key = cell("vgg16", "ra")
    found = next(r for r in other if all(r.get(k) == v for k, v in key.items()))
    found["accuracy"] -= 5
    assert table_in_readme(text) != as_in_readme(other)


def test_the_sizes_of_the_domains_are_those_of_the_rows():
    assert {name: classes for name, (classes, _) in SIZES.items()} == {
        name: len(classes) for name, classes in readers.CLASSES.items()
    }
    tested = {(r["domain"], r["n"]) for r in committed() if "n" in r}
    assert tested == {(name, parts[-1]) for name, (_, parts) in SIZES.items()}


def several_starts(rows) -> set[tuple[str, int]]:
    """(domain, seed) where the methods of Table 1 and of the curves start from different A's."""
    found, of = Rows(rows), {}
    points = [(m, table1.options(m, len(found.domains))) for m in tables.METHODS]
    for method, options in (*points, *parameters.cells()):
        if "adapter" in cn.METHODS[method].options:
            for place, r in found.of(cell("vgg16", method, options)).items():
                of.setdefault(place, []).append((r["stages"]["train"], r.get("A")))
    return {
        place
        for place, starts in of.items()
        if len({v for v, _ in starts}) > 1 or len({A for _, A in starts if A}) > 1
    }


def test_what_is_compared_starts_from_the_same_A():
    assert several_starts(committed()) == set()
    for change in ({"stages": {"train": 1.0}}, {"A": "another"}):
        other = copy.deepcopy(committed())
        key = {"method": "covnorm", "domain": "sketches", "seed": 0, "backbone": "vgg16"}
        at_t = {**key, "options": {"variance": 0.99}, "lr": settings.rate("vgg16", "covnorm")}
        next(r for r in other if all(r.get(k) == v for k, v in at_t.items())).update(change)
        assert several_starts(other) == {("sketches", 0)}


@pytest.mark.slow
def test_the_page_in_docs_is_made_of_the_rows_in_the_results():
    made = render(committed())
    remedy = "run `python -m benchmarks.paper page`"
    for name, content in made.items():
        file = DOCS / name
        assert file.exists(), f"{file}: {remedy}"
        assert file.read_text() == content, f"{file}: {remedy}"
    kept = {f"results/{f.name}" for f in (DOCS / "results").glob("*")}
    assert kept == {name for name in made if "/" in name}, remedy


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.slow
def test_another_accuracy_is_another_page(which):
    rows = made_up()
    rows = [r for r in rows if r["method"] == "covnorm" and "M" not in r["options"]]
    other = copy.deepcopy(rows)
    other[which]["accuracy"] += 1.3
    other[which]["tested"]["final"] += 1.3
    page, changed = render(rows), render(other)
    assert page == render(copy.deepcopy(rows))
    assert page["results.md"] != changed["results.md"]


# ── the files ────────────────────────────────────────────────────────────────────────────────


def test_every_figure_of_the_markdown_is_a_sound_svg():
    made = full()
    shown = set(re.findall(r"\]\((results/[^)]*)\)", made["results.md"]))
    assert shown == {name for name in made if name.endswith(".svg")}
    assert len(shown) == 9
    for name in shown:
        svg = ET.fromstring(made[name])
        assert svg.attrib["aria-label"]
        assert not re.search(r"(href|src)=\"(?!#)", made[name])


def test_what_we_think_of_table_2_waits_for_all_of_its_cells():
    remark = "All means are close, and the domains do not agree on an order."
    assert remark in full()["results.md"]
    fewer = [r for r in made_up() if (r["backbone"], r["method"]) != ("resnet26", "dan")]
    assert remark not in render(fewer)["results.md"]


def test_no_table_is_without_its_rows():
    made = full()["results.md"]
    # Of the domains and of the gains: made of no rows of their own.
    assert made.count("\n| :--") == made.count("The rows of this table") + 3
    # Of the other figures they are those of the table beside.
    assert made.count("The rows of this figure") == 3
    for key in ('"method": "spectra"', '"options": {"rank": 0.125}'):
        assert key in made


def test_the_rates_that_are_used_are_among_those_that_are_tried():
    for backbone in PIXELS:
        for kind in (*rates.kinds(backbone), *(f"cut-{way}" for way in metric.TUNED)):
            assert settings.rate(backbone, kind) in settings.rates(backbone, kind)
        assert settings.rate(backbone, "covnorm-joint") == settings.rate(backbone, "covnorm")
        assert settings.rate(backbone, "lwf") == settings.rate(backbone, "fnft")


def test_the_small_points_of_a_curve_have_a_rate_of_their_own_searched_at_one_of_them():
    for method in parameters.CURVES:
        kinds = [settings.kind(method, options) for options in parameters.curve(method)]
        small = [f"{method}-small"] * 3  # t up to 0.95, or d/16, d/32 and d/64
        assert kinds == (small + 3 * [method] if method == "covnorm" else 2 * [method] + small)
    assert settings.kind("covnorm", {"variance": 0.9, "M": "random"}) == "covnorm-random-small"
    for kind, (method, options) in rates.OTHERS.items():
        assert settings.kind(method, options) == kind
        assert (method, options) in parameters.cells()
    assert {settings.kind(*point) for point in parameters.cells()} <= {*rates.kinds("vgg16")}
    for like in ("covnorm", "covnorm-joint"):
        small, large = (settings.rate("vgg16", f"{like}{end}") for end in ("-small", ""))
        assert small == RATES["vgg16"]["covnorm-small"] != large
    # Where no small ones were searched, they have the rate of the others.
    assert settings.rate("efficientnet-lite0", "covnorm-small") == 3e-4
    told = "Small: t up to 0.95, searched at 0.9, and ranks up to d/16, searched at d/32."
    assert told in full()["results.md"]


def test_the_better_rate_is_told_from_the_used_one():
    low, middle, high = settings.rates("vgg16", "ra")
    rows = []
    for domain, values in (("objects", (60.0, 55.0, 63.0)), ("sketches", (80.0, 75.0, 79.0))):
        for lr, value in zip((low, middle, high), values, strict=True):
            key = start("vgg16", lr)
            rows.append({**row(key, domain, 0, 50.0, 1), "validation": value})
            # Another seed is no part of the search.
            rows.append({**row(key, domain, 1, 50.0, 1), "validation": 10.0})
    line = cells_of(section("rates", Rows(rows), backbone="vgg16"), "RA")
    used = f"{settings.rate('vgg16', 'ra'):g}"
    tried = f"{low:g}: 70.0; {middle:g}: 65.0; {high:g}: 71.0"
    assert line == ["RA", tried, f"{high:g}", used]
    assert "there may be a better one, for: RA.\n" in section("rates", Rows(rows), backbone="vgg16")
    fewer = section("rates", Rows(rows[:-2]), backbone="vgg16")
    assert cells_of(fewer, "RA")[2] == "–"
    assert "at the end of the range" not in fewer


def test_a_rate_at_which_tuning_was_undone_is_told():
    rows = [
        row(cell("vgg16", "svd-fta", {}, lr=lr), domain, 0, 50.0, 1, declined=lr == 3e-3)
        for lr in settings.rates("vgg16", "svd-fta")
        for domain in ("objects", "sketches")
    ]
    rows[-1]["declined"] = False  # of sketches
    rows[1]["seed"], rows[1]["declined"] = 1, True  # no part of the search
    rows.append({**rows[1], "seed": 0, "declined": False})
    tried = cells_of(section("rates", Rows(rows), backbone="vgg16"), "SVD+FTA")[1]
    assert tried.endswith("(undone on objects)")
    assert tried.count("undone") == 1


def test_a_third_domain_decides_where_two_cannot():
    found = {
        1e-4: {"objects": 60.0, "sketches": 80.0, "drawings": 99.0},
        3e-4: {"objects": 60.2, "sketches": 80.0, "drawings": 98.0},
        1e-3: {"objects": 61.0, "sketches": 80.0, "drawings": 20.0},
        3e-3: {"objects": 60.0, "sketches": 79.0, "drawings": 100.0},
    }
    assert rates.close(found) == [3e-4, 1e-3]  # 0.4 below the best; the others 0.5 and 1
    assert rates.best(found) == [3e-4]
    alone = {lr: values for lr, values in found.items() if lr not in (1e-4, 3e-4)}
    assert rates.close(alone) == []
    assert rates.best(alone) == [1e-3]
    same = dict.fromkeys((1e-4, 3e-4, 1e-3), found[1e-4])
    assert rates.best(same) == [1e-4, 3e-4, 1e-3]
    rows = []
    grid = settings.rates("vgg16", "fnft")
    for lr, values in zip(grid, found.values(), strict=True):
        for domain, value in values.items():
            key = cell("vgg16", "fnft", lr=lr)
            rows.append({**row(key, domain, 0, 50.0, 1), "validation": value})
    line = cells_of(section("rates", Rows(rows), backbone="vgg16"), "FNFT")
    validated = ("70.0", "70.1 (drawings 98.0)", "70.5 (drawings 20.0)", "69.5")
    assert line[1] == "; ".join(f"{lr:g}: {v}" for lr, v in zip(grid, validated, strict=True))
    assert line[2] == f"{grid[1]:g}"
    equal = [{**r, "validation": found[1e-4][r["domain"]]} for r in rows]
    text = section("rates", Rows(equal), backbone="vgg16")
    assert cells_of(text, "FNFT")[2] == " or ".join(f"{lr:g}" for lr in grid)
    assert "Of equal rates" in text
    assert "at the end of the range" not in text
    asked = [r for r in rows if (r["lr"], r["domain"]) != (grid[2], "drawings")]
    assert cells_of(section("rates", Rows(asked), backbone="vgg16"), "FNFT")[2] == "–"


def test_the_rate_of_a_cut_is_searched_over_its_shares():
    rows = []
    for lr, value in zip(settings.rates("vgg16", "cut-loss"), (60.0, 70.0, 65.0), strict=True):
        for share in metric.SHARES:
            for domain in rates.SEARCH:
                off = share / 8 - 7 / 3  # 0 on the mean
                key = cut("vgg16", "loss", share, True, lr)
                rows.append({**row(key, domain, 0, 50.0, 1), "validation": value + off})
    name = f"cut: {metric.WAYS['loss']}"
    line = cells_of(section("rates", Rows(rows), backbone="vgg16"), name)
    assert line[1:3] == ["0.0003: 60.0; 0.001: 70.0; 0.003: 65.0", "0.001"]
    fewer = cells_of(section("rates", Rows(rows[:-1]), backbone="vgg16"), name)
    assert fewer[1:3] == ["0.0003: 60.0; 0.001: 70.0; 0.003: –", "–"]


def test_another_start_of_m_has_a_rate_of_its_own(monkeypatch):
    options = {"variance": 0.99, "M": "random"}
    monkeypatch.setitem(RATES["vgg16"], "covnorm-random", 1e-2)
    assert cell("vgg16", "covnorm", options)["lr"] == 1e-2
    assert cell("vgg16", "covnorm", {"variance": 0.99})["lr"] == RATES["vgg16"]["covnorm"]
    rows = []
    validated = (50.0, 40.0, 60.0, 45.0)
    for lr, value in zip(settings.rates("vgg16", "covnorm-random"), validated, strict=True):
        for domain in rates.SEARCH:
            key = cell("vgg16", "covnorm", options, lr=lr)
            rows.append({**row(key, domain, 0, 50.0, 1), "validation": value})
    line = cells_of(section("rates", Rows(rows), backbone="vgg16"), "CovNorm from a random M")
    assert line[1:] == ["0.0003: 50.0; 0.001: 40.0; 0.003: 60.0; 0.01: 45.0", "0.003", "0.01"]


def test_no_table_is_made_at_a_rate_that_the_search_did_not_choose():
    def validates(method, domain, _seed, *, lr, **_):
        best = 3e-3 if method == "fta" else 1e-3
        return {"validation": 70 - (lr != best) + (domain == "objects")}

    tried = {"rate": lambda _: 1e-3, "cell": validates, "folder": None}
    searched = SimpleNamespace(backbone="vgg16", **tried)
    rates.check(searched, ("ra", "covnorm", "svd", "covnorm-joint"))
    with pytest.raises(SystemExit, match=r"fta on vgg16: 0\.003 validates best"):
        rates.check(searched, ("ra", "fta"))
    searched.folder = "originals"
    rates.check(searched, ("ra", "fta"))  # at what was chosen on ours
    searched.folder, searched.cell = None, lambda *_, **__: {"validation": 70}
    rates.check(searched, ("ra", "fta"))  # of equal ones any may be used


@pytest.mark.parametrize("backbone", PIXELS)
@pytest.mark.slow
def test_every_backbone_says_how_its_images_are_prepared(backbone):
    net = cn.load_backbone(backbone, weights="random")
    assert {"mean", "std"} <= preprocessing_of(net).keys()


def test_every_way_has_a_name():
    assert {*metric.METRICS, *CUTS} <= set(metric.WAYS)
    assert all(metric.WAYS.values())


class Twice:
    """A benchmark whose cells have these accuracies, one after the other."""

    backbone, folder = "vgg16", None

    def __init__(self, *accuracies, there=None):
        self.rows, self.to_come, self.there = [], list(accuracies), there
        self.lines = SimpleNamespace(find=self.find, add=lambda row: self.rows.append(row) or row)

    def find(self, **key):
        return next((r for r in self.rows if all(r[k] == v for k, v in key.items())), None)

    def where(self, domain, seed):
        return {"backbone": "vgg16", "domain": domain, "images": "", "seed": seed}

    def cell(self, *_, again=False, **__):
        accuracy = self.to_come.pop(0) if again or self.there is None else self.there[0]
        made = cpu() if again or self.there is None else self.there[1]
        numbers = {"validation": 0.0, "parameters": 1, "seconds": 1.0}
        return {"accuracy": accuracy, "cpu": made, **numbers}


def test_a_cell_that_does_not_repeat_itself_is_told_each_time():
    again.run(same := Twice(70.0, 70.0, 60.0, 60.0))
    assert [(r["first"], r["accuracy"]) for r in same.rows] == [(70.0, 70.0), (60.0, 60.0)]
    again.run(same)  # what is there is not run again
    other = Twice(70.0, 70.5)
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"ra on faces, vgg16: 70\.0, then 70\.5"):
            again.run(other)
    text = section("again", Rows([*same.rows, *other.rows]))
    body = [line for line in text.splitlines() if line.startswith("|")][2:]
    outcomes = [line.strip("|").split("|")[-1].strip() for line in body]
    assert outcomes == ["the same", "the same", "**not the same**"]
    # A row of another machine is no first run of this one.
    again.run(far := Twice(70.0, 70.0, 60.0, 60.0, there=(50.0, "other")))
    assert [r["first"] for r in far.rows] == [70.0, 60.0]
