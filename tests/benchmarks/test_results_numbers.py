"""The numbers on the page of results, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import statistics

import pytest

pytest.importorskip("matplotlib")

from result_rows import cells_of, made_up, row

import torch_covnorm as cn
from benchmarks.domains import DOMAINS
from benchmarks.paper import compare, metric, parameters, settings, table1
from benchmarks.paper.keys import cell, cut, shared, start
from benchmarks.paper.page import numbers, pointer, section
from benchmarks.paper.rows import Rows

# ── statistics against numbers worked out by hand ────────────────────────────────────────────


def test_deviation_and_error():
    assert compare.deviation([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(math.sqrt(32 / 7))
    assert compare.error([1.0, 3.0]) == pytest.approx(1.0)
    assert compare.deviation([3.0]) is None
    assert compare.error([3.0]) is None


@pytest.mark.parametrize(
    ("freedom", "t"),  # a printed table of Student's t, two-sided 95 %
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (6, 2.447), (13, 2.160), (30, 2.042)],
)
def test_intervals_are_by_students_t(freedom, t):
    gains = [float(i * i) for i in range(freedom + 1)]
    found = compare.interval(gains)
    assert found.mean == pytest.approx(statistics.fmean(gains))
    off = statistics.stdev(gains) / math.sqrt(len(gains))
    assert (found.high - found.mean) / off == pytest.approx(t, abs=6e-4)
    assert (found.mean - found.low) / off == pytest.approx(t, abs=6e-4)


def test_means_are_of_the_seeds_that_have_every_domain():
    values = {"a": {0: 60.0, 1: 64.0}, "b": {0: 80.0, 1: 90.0, 2: 10.0}}
    assert compare.over_seeds(values, ["a", "b"]) == [70.0, 77.0]
    assert compare.over_seeds(values, ["a", "b", "c"]) == []
    assert compare.over_seeds({}, []) == []


def test_a_paired_comparison_averages_seeds_and_then_takes_domains():
    a = {"p": {0: 71.0, 1: 73.0}, "q": {0: 52.0}, "r": {0: 93.0, 5: 1.0}}
    b = {"p": {0: 70.0, 1: 70.0}, "q": {0: 50.0}, "r": {0: 90.0, 6: 99.0}, "s": {0: 1.0}}
    found = compare.paired(a, b, ["p", "q", "r", "s"])
    assert found is not None
    # Differences 2, 2, 3: mean 7/3, s = √(1/3), half = 4.3027 · s/√3 = 1.4342.
    assert found.mean == pytest.approx(7 / 3)
    assert (found.high - found.low) / 2 == pytest.approx(1.4342, abs=1e-4)
    assert (found.domains, found.verdict) == (3, "above")
    assert numbers.sentence(found) == "above by 2.3 points (95 % interval +0.9 to +3.8, 3 domains)"
    other = compare.paired(b, a, ["p", "q", "r"])
    assert numbers.sentence(other).startswith("below by 2.3 points")
    unsure = compare.paired({"p": {0: 1.0}, "q": {0: -1.0}}, {"p": {0: 0.0}, "q": {0: 0.0}}, "pq")
    assert numbers.sentence(unsure).startswith("not distinguishable: 0.0 points")


def test_one_domain_has_no_interval_and_none_no_comparison():
    found = compare.paired({"p": {0: 3.0}}, {"p": {0: 1.0}}, ["p"])
    assert found is not None
    assert found.verdict == "not distinguishable"
    assert "says nothing about other domains" in numbers.sentence(found)
    assert compare.paired({"p": {0: 3.0}}, {"p": {1: 1.0}}, ["p"]) is None
    assert numbers.sentence(None) == "not run yet"


# ── which rows ───────────────────────────────────────────────────────────────────────────────


def test_a_row_with_further_options_is_not_the_plain_one():
    key = cell("vgg16", "covnorm", {"variance": 0.99})
    others = [
        {**key, "options": {"variance": 0.99, "M": "random"}},
        {**key, "options": {"variance": 0.9}},
        {**key, "options": {}},
        {**key, "lr": 0.5},
        {**key, "epochs": 99},
        {**key, "backbone": "resnet26"},
        {**key, "tuned": True},
        {**key, "share": 8},
    ]
    rows = [row(k, "objects", 0, 10.0 + i, 0.1) for i, k in enumerate(others)]
    assert Rows(rows).of(key) == {}
    right = row(key, "objects", 0, 50.0, 0.1)
    assert Rows([*rows, right]).values(key) == {"objects": {0: 50.0}}


def test_of_two_rows_with_one_key_the_first_counts():
    key = cell("vgg16", "ra")
    rows = [row(key, "objects", 0, 50.0, 1), row(key, "objects", 0, 60.0, 1)]
    assert Rows(rows).values(key) == {"objects": {0: 50.0}}


def test_rows_of_former_images_are_left_out():
    key = cell("vgg16", "ra")
    old, new = row(key, "objects", 0, 50.0, 1), row(key, "objects", 1, 60.0, 1)
    old["images"] = "before"
    found = Rows([old, new])
    assert found.values(key) == {"objects": {1: 60.0}}
    assert found.left_out == 1


def test_a_pointer_finds_its_rows_in_the_file():
    key = cell("vgg16", "covnorm", {"variance": 0.99})
    # As the benchmark writes its lines: where, then the method and its settings.
    where = {"backbone": "vgg16", "domain": "objects", "images": "x", "seed": 0}
    line = json.dumps({**where, **{k: v for k, v in key.items() if k != "backbone"}, "accuracy": 1})
    assert pointer(key) in line
    way = {
        "method": "cut",
        "way": "loss",
        "share": 8,
        "tuned": True,
        "lr": settings.rate("vgg16", "cut-loss"),
    }
    assert pointer(cut("vgg16", "loss", 8, True)) in json.dumps({**where, **way})
    assert pointer(cell("vgg16", "ra")) not in line


def test_a_point_of_a_curve_that_table_1_has_is_not_run_again():
    for method in ("covnorm", "svd-fta", "fta"):
        assert table1.options(method, len(DOMAINS)) in parameters.curve(method)
    assert {"rank": cn.METHODS["fta"].options["rank"]} not in parameters.curve("fta")


def test_sizes_beside_two_domains_are_of_these_alone():
    key = cell("vgg16", "covnorm", {"variance": 0.99})
    rows = [row(cell("vgg16", "ra"), d, 0, 80.0, 1.0) for d in DOMAINS]
    rows += [row(key, d, 0, 80.0, 0.2 if d in parameters.DOMAINS else 0.9) for d in DOMAINS]
    table = section("starts", Rows(rows))
    found = cells_of(table, "t = 0.99 | closed form")
    assert found[-1] == "20.0 %"
    # Six thresholds, and two other starts at two of them.
    assert "2 of 20 cells were run." in table
    # Other starts have the first seed alone, so that of the closed form stands beside them.
    further = [row(key, d, seed, 95.0, 0.2) for d in DOMAINS for seed in (1, 2)]
    assert section("starts", Rows([*rows, *further])) == table


def test_what_shared_bases_of_the_loss_gain_is_said_by_domain():
    better = {d: 1.0 + i for i, d in enumerate(DOMAINS)}  # by 1, 2, … 7: a mean of 4
    rows = [
        row(key, d, 0, 70.0 + (by if way == "loss" else 0), 0.1)
        for way in ("variance", "loss")
        for key in [shared("efficientnet-lite0", way, 1 / 8, len(DOMAINS), True)]
        for d, by in better.items()
    ]
    text = section("shared", Rows(rows))
    # s = √(28/6) = 2.1602, half = 2.4469 · s/√7 = 1.998
    gain = "above by 4.0 points (95 % interval +2.0 to +6.0, 7 domains)"
    assert f"compared with those of variance at d/8: {gain}" in text
    assert "compared with those of the A's only at d/8: not run yet" in text


def test_a_joint_method_is_found_by_how_many_share():
    seven, two = cell("vgg16", "covnorm-joint"), cell("vgg16", "covnorm-joint", domains=2)
    assert seven["options"] == {"sharing": 7}
    rows = [row(two, d, 0, 70.0, 0.1) for d in ("objects", "sketches")]
    assert Rows(rows).of(seven) == {}
    assert len(Rows(rows).of(two)) == 2


# ── tables ───────────────────────────────────────────────────────────────────────────────────


def brief_table1(rows, domains):
    """Tables 1 as a terminal shows them: accuracies, then sizes."""
    found = Rows(rows, domains)
    return "\n".join(section(name, found, brief=True) for name in ("table1", "sizes"))


def test_table1_by_hand_with_what_there_is():
    key, ours = cell("vgg16", "ra"), cell("vgg16", "covnorm", {"variance": 0.99})
    rows = [
        row(key, "objects", 0, 60.0, 1),
        row(key, "objects", 1, 64.0, 1),
        row(key, "sketches", 0, 80.0, 1),
        row(key, "sketches", 1, 82.0, 1),
        row(ours, "objects", 0, 61.0, 0.125),
    ]
    text = brief_table1(rows, ("objects", "sketches"))
    head = cells_of(text, "method")
    assert "other data" in head[4]
    in_full = text.partition("Table 1.")[2]
    # Means of seeds 70 and 73: deviation 3/√2 = 2.1.
    ra = ["RA", "62.0 ± 2.8", "81.0 ± 1.4", "71.5 ± 2.1", "82.2"]
    assert cells_of(text, "RA")[:5] == ra
    assert cells_of(in_full, "RA")[1:] == ["1,000,000", "100 %", "10.0 %", "10 %", "1,020,000"]
    # One domain of two: no mean.
    assert cells_of(text, "CovNorm")[:4] == ["CovNorm", "61.0", "–", "–"]
    assert cells_of(text, "CovNorm")[5:] == ["12.5 %", "1"]
    assert cells_of(in_full, "CovNorm")[1:4] == ["125,000", "12.5 %", "1.25 %"]
    assert "3 of 4 cells were run" in text
    assert "| FNFT |" not in text


def test_the_A_of_table_1_is_that_which_covnorm_starts_from():
    key, names = cell("vgg16", "covnorm", {"variance": 0.99}), ("objects", "sketches")
    rows = [row(key, d, 0, 70.0, 0.1, tested={"train": 61.0, "final": 70.0}) for d in names]
    rows += [row(start("vgg16"), d, 0, 65.0, 1.0) for d in names]  # one that was lost
    assert cells_of(brief_table1(rows, names), "A")[1:4] == ["61.0", "61.0", "61.0"]


def test_what_is_shared_is_counted_in_equal_parts():
    key = cell("vgg16", "covnorm-joint", {"variance": 0.99}, domains=2)
    names = ("objects", "sketches")
    rows = [row(key, d, 0, 70.0, 0.1, shared=60_000) for d in names]
    text = brief_table1(rows, names).partition("Table 1.")[2]
    assert cells_of(text, "joint CovNorm")[1] == "130,000"


def test_table2_scores_by_the_formula():
    text = section("table2", Rows(made_up()))
    assert all(part.endswith("(250)") for part in cells_of(text, "FNFT")[1:7])
    assert cells_of(text, "FNFT")[8:] == ["1500", "1250", "7.00"]
    base = [float(part.split()[0]) for part in cells_of(text, "FNFT")[1:7]]
    ra = [float(part.split()[0]) for part in cells_of(text, "RA")[1:7]]
    worst = [2 * (100 - b) for b in base]
    points = [1000 * (max(0, w - (100 - a)) / w) ** 2 for a, w in zip(ra, worst, strict=True)]
    assert float(cells_of(text, "RA")[7]) == pytest.approx(sum(ra) / 6, abs=0.06)
    assert float(cells_of(text, "RA")[8]) == pytest.approx(sum(points), abs=1)
    assert "still reach" not in text
    kept = [{**r, "forgetting": {"after": 40.0 + len(r["domain"])}} for r in made_up()]
    names = [len(d) for d in DOMAINS if d != "objects"]
    expected = f"on objects the copies still reach {40 + sum(names) / 6:.1f} % on the mean."
    assert expected in section("table2", Rows(kept))
    # Without an error of the baseline the formula would divide by nothing: half an image is wrong.
    rows = [r for r in made_up() if r["backbone"] == "resnet26"]
    for r in rows:
        if r["domain"] == "faces":  # 120 to test with: 0.4 % is half of one, 2.5 % are three
            r["accuracy"] = {"fnft": 100.0, "ra": 100.0, "piggyback": 97.5}.get(r["method"], 99.5)
    text = section("table2", Rows(rows))
    points = [cells_of(text, m)[6].split()[1] for m in ("FNFT", "RA", "Piggyback")]
    assert points == ["(250)", "(250)", "(0)"]
    worst = 2 * 100 * 0.5 / 120
    assert cells_of(text, "DAN")[6] == f"99.5 ({1000 * ((worst - 0.5) / worst) ** 2:.0f})"


def without_faces(rows: list[dict], key: dict) -> list[dict]:
    return [
        r
        for r in rows
        if not (r["domain"] == "faces" and all(r.get(k) == v for k, v in key.items()))
    ]


def test_a_neighbour_without_a_domain_is_left_out_alone():
    found = Rows(without_faces(made_up(), cut("vgg16", "svd", 32, False)))
    assert metric.whole_domains(found, "vgg16") == list(DOMAINS)
    line = cells_of(section("cuts", found, backbone="vgg16"), metric.WAYS["svd"])
    assert [cell == "–" for cell in line[1:4]] == [False, False, True]


def test_the_metric_table_is_of_domains_that_both_metrics_have():
    found = Rows(without_faces(made_up(), cut("vgg16", "variance", 32, False)))
    assert metric.whole_domains(found, "vgg16") == list(DOMAINS[:-1])
    assert metric.whole_domains(found, "efficientnet-lite0") == list(DOMAINS)
    of_loss = found.values(cut("vgg16", "loss", 8, True))
    by_seed = [statistics.fmean(of_loss[d][s] for d in DOMAINS[:-1]) for s in range(3)]
    mean, off = metric.means(found, "vgg16")["loss", 8, True]
    assert mean == pytest.approx(statistics.fmean(by_seed))
    assert off == pytest.approx(statistics.stdev(by_seed) / math.sqrt(3))
    text = section("cuts", found, backbone="vgg16")
    assert "6 of 7 domains (objects, products, digits, sketches, drawings, solar)" in text
    # A way that was never to be tuned.
    assert cells_of(text, metric.WAYS["svd"])[4:] == ["–", "–", "–"]


def test_the_smallest_files_are_means_over_domains_that_all_have():
    rows = [r for r in made_up() if r["backbone"] == "vgg16"]
    text = section("smallest", Rows(rows), backbone="vgg16")
    found = cells_of(text, "loss metric")
    assert found[1:4] == ["400 kB", "10.0 %", "int8 21"]
    assert cells_of(text, "variance metric")[1] == "800 kB"
    assert "smaller in 7 of 7 domains; the mean difference is −400.0 kB" in text
    fewer = [r for r in rows if r["domain"] != "faces" or "max_drop" not in str(r.get("options"))]
    text = section("smallest", Rows(fewer), backbone="vgg16")
    assert "6 of 7 domains" in text
    assert cells_of(text, "loss metric")[3] == "int8 18"


def test_a_neighbour_is_the_best_of_the_seed_that_all_have():
    rows = [r for r in made_up() if r.get("way") in (None, *metric.METRICS, "svd", "svd-greedy")]
    key = cut("vgg16", "svd-greedy", 8, False)
    for r in rows:
        if r.get("way") in ("svd", "svd-greedy"):
            r["accuracy"] = 70.0 if r["way"] == "svd" else 60.0 + 30.0 * (r["seed"] > 0)
    found = Rows(rows)
    assert metric.means(found, "vgg16")["svd-greedy", 8, False][0] == pytest.approx(80)
    assert metric.best_neighbour(found, "vgg16", 8, False) == "svd"
    assert statistics.fmean(v[0] for v in found.values(key).values()) == 60.0
    loss, _ = metric.means(found.only_seed(0), "vgg16")["loss", 8, False]
    assert f"the loss metric has {loss:.1f} / " in section("cuts", found, backbone="vgg16")


def test_originals_have_their_published_numbers_beside_them():
    names = ("FGVC", "CIFAR100")
    rows = [row(cell("vgg16", "ra"), d, 0, 80.0, 1) for d in names]
    text = brief_table1(rows, names)
    line = cells_of(text, "RA")
    assert line[1:5] == ["80.0 (88.9)", "80.0 (79.5)", "80.0", "84.2"]  # (88.92 + 79.55)/2
    assert "other data" not in text
    assert "other data" in brief_table1(rows, ("objects",))
