"""The report: the page says what the facts say, whatever the facts are."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_facts import (
    ATTACKS,
    CASES,
    RA,
    SITES,
    domain,
    joint,
    made_up,
    rank,
    spectra_of,
)

from torch_covnorm import CovNormError
from torch_covnorm.report import write_report
from torch_covnorm.report.figures import POINTS, accuracies, curve, ratios, spectrum
from torch_covnorm.report.wording import number, percent, share, shortened, size

# ── the page as a parser sees it ─────────────────────────────────────────────────────────────

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """A parser that collects tags, ids, texts and every structural fault."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        self.faults += [f"<{tag}> stays open" for tag in self.open]
        ids = [a["id"] for _, a in self.tags if "id" in a]
        self.faults += [f"id {i} is there twice" for i in {i for i in ids if ids.count(i) > 1}]
        for tag, attributes in self.tags:
            for name, value in attributes.items():
                if name in ("href", "src") and not value.startswith(("#", "data:image/png;")):
                    self.faults.append(f"{tag} {name}={value[:60]}")
                if name == "href" and value.startswith("#") and value[1:] not in ids:
                    self.faults.append(f"{value} leads nowhere")
                if name.startswith("on"):
                    self.faults.append(f"{tag} {name}=…")
            if tag in ("script", "link", "iframe", "object"):
                self.faults.append(f"<{tag}>")
            if tag == "img" and not attributes.get("alt"):
                self.faults.append("img without alt")
            if tag == "svg" and not (attributes.keys() & {"aria-label", "aria-hidden"}):
                self.faults.append("svg without a label")
        if self.count("table") != self.count("caption"):
            self.faults.append("a table without caption")
        if re.search(r"https?://|url\(|@import", html):
            self.faults.append("an address")

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> out of place")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(t == tag for t, _ in self.tags)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).replace("\u00a0", " ").split())


def written(facts: dict, folder: Path) -> Page:
    return Page(write_report(facts, folder / "report.html").read_text(encoding="utf-8"))


@functools.cache
def page_of(case: str) -> Page:
    """Render each case once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        return written(CASES[case](), Path(folder))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_report_is_one_sound_page_whatever_the_facts(case):
    page = page_of(case)
    assert page.faults == []
    assert page.count("h1") == page.count("main") == page.count("header") == 1


@pytest.mark.parametrize(
    "html",
    [
        "<p><b></p></b>",
        "<div>",
        "<p id=a></p><p id=a></p>",
        "<script>1</script>",
        "<img src='data:image/png;x' alt=x onerror=1>",
        "<img src='//elsewhere/x.png' alt=x>",
        "<a href='#nowhere'>x</a>",
        "<p>http://elsewhere</p>",
        "<svg></svg>",
        "<table></table>",
    ],
)
def test_control_the_parser_sees_what_is_not_sound(html):
    assert Page(html).faults


def test_names_are_text_and_never_markup():
    page = page_of("hostile")
    for attack in ATTACKS[:6]:
        assert " ".join(attack.split()) in page.text
    assert "49" not in {t.strip() for t in page.texts}  # 7 * 7 was not computed
    assert page.count("img") == 2 * len(ATTACKS)
    assert "not utf-8: ?, a bell:" in page.text


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


def test_the_numbers_on_the_page_are_those_of_the_facts(tmp_path):
    facts = made_up(*(domain(name, sites={"stem": 320}) for name in "abcd"))
    for i, one in enumerate(facts["domains"]):
        one["results"]["bytes"] += 1000 * i
        one["results"]["accuracy"]["final"] = 90.0 + i
    page = written(facts, tmp_path)
    values = [a["value"] for tag, a in page.tags if tag == "data"]
    total = 4 * 301234 + 6000
    assert values[:3] == [str(v) for v in (total, total + 18608032, 4 * 18608032)]
    assert "4 domains 1.2 MB" in page.text
    assert "4 fine-tuned networks 74.4 MB" in page.text
    assert f"take {100 * total / (4 * 18608032):.2f} % of what 4 fine-tuned" in page.text
    adapter = facts["domains"][0]["results"]["parameters"]["adapter"]
    for i, one in enumerate(facts["domains"]):
        own = one["results"]["bytes"]
        row = f"{one['name']} covnorm 10 {90 + i}.0 % 500 test {adapter:,} "
        row += f"{100 * adapter / 4652008:.2f} % {own / 1000:.0f} kB {100 * own / 18608032:.2f} %"
        assert row.replace(",", " ") in page.text
    assert f"{100 * adapter / RA:.2f} % of RA’s {RA:,} adapter".replace(",", " ") in page.text
    error = 100 * (0.9 * 0.1 / 500) ** 0.5
    assert f"The standard error of the final accuracy is {error:.1f} points" in page.text
    assert "1 file could not be read and was left out" in page.text
    assert "class 0 class 1 5 of 50" in page.text  # the one mistake of the confusion matrix
    assert "✗ wrong class 9 · 61 % truth: class 0" in page.text


def test_layers_have_the_ranks_and_the_ratio_of_the_facts():
    text = page_of("one domain").text
    for i, (site, (kx, ky)) in enumerate(domain()["results"]["ranks"].items(), start=1):
        assert f"{i} {site} {SITES[site]} {kx} {ky} {ky / kx:.2f}" in text


def test_the_spectrum_of_A_is_of_its_squared_singular_values():
    text = page_of("one domain").text
    sites = list(SITES.items())
    for site, d in (sites[0], sites[8], sites[15]):
        s = spectra_of(d)
        kx, ky, k = rank(s["x"], 0.9), rank(s["y"], 0.9), rank([a * a for a in s["A"]], 0.9)
        needs = f"{kx} of {d} directions of x, {ky} of {d} of y and {k} of {d} of A"
        assert f"{site} 90 % of the variance takes {needs}" in text
        assert k != rank(s["A"], 0.9)  # control: plain singular values would say another number


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no domain", "There are no domains yet. covnorm add NAME FOLDER"),
        ("bare record", "final, as stored – not measured"),
        ("bare record", "No confusion matrix was recorded"),
        ("bare record", "10 classes; the number of images per class was not recorded"),
        ("1000 classes", "it is kept up to 100 classes, and this domain has 1 000"),
        ("1000 classes", "8 largest and the 8 smallest of 1 000; from 85 to 1 084 training"),
        ("1000 classes", "… 984 classes in between"),
        ("bn", "Method bn chooses no ranks"),
        ("bn", "This domain has no matrix A"),
        ("130 domains", "follow for the first 24 of 130 domains"),
        ("130 domains", "domain-129 covnorm 3 95.6 %"),
    ],
)
def test_what_is_missing_is_said(case, words):
    assert words in page_of(case).text
    assert page_of("130 domains").count("article") == 24


def test_a_validation_accuracy_says_that_it_is_one(tmp_path):
    facts = made_up(domain("digits", sites={}), domain("fashion", sites={}))
    facts["domains"][1]["results"]["on"] = "val"
    text = written(facts, tmp_path).text
    assert "fashion (val)" in text
    assert "95.6 % 150 val" in text
    assert "digits (val)" not in text


def test_a_basis_is_counted_once_and_named_where_it_is_used():
    page = page_of("joint")
    values = [int(a["value"]) for tag, a in page.tags if tag == "data"]
    assert values[0] == 301234 + 489600
    assert "the basis joint 244 776 5.26 %" in page.text
    assert "joint letters , digits k x" in page.text
    assert "covnorm add" not in page.text  # joining is not adding


def command_of(record: dict, folder: Path) -> list[str]:
    html = write_report(made_up(record), folder / "r.html").read_text()
    line = re.search(r"<pre><code>(.*?)</code></pre>", html)
    return shlex.split(unescape(line[1])) if line else []


def test_the_command_gives_covnorm_add_the_settings_of_the_domain(tmp_path):
    import typer

    from torch_covnorm.cli.app import app
    from torch_covnorm.cli.options import pairs

    record = domain(sites={})
    record["settings"] |= {"budget": 38000, "preset": 'it\'s "paper"', "dtype": "float16"}
    words = command_of(record, tmp_path)
    assert words[:2] == ["covnorm", "add"]
    add = typer.main.get_command(app).commands["add"]
    read = add.make_context("add", words[2:]).params
    assert (read["name"], str(read["images"]), read["method"]) == ("digits", "my images", "covnorm")
    assert (read["variance"], read["epochs"], read["seed"]) == (0.9, 6, 0)
    assert (read["dtype"], read["pixels"], read["fit"]) == ("float16", 64, "squash")
    assert read["background"] == "none"  # a record from before there was one
    record["preprocessing"]["background"] = "#0a7fc3"
    again = add.make_context("add", command_of(record, tmp_path)[2:]).params
    assert again["background"] == "#0a7fc3"
    assert pairs(read["settings"]) == {"budget": 38000, "preset": 'it\'s "paper"'}
    record["settings"]["augment"] = ["torch_covnorm.data.images.Augment", "Augment(flip=0.5)"]
    assert command_of(record, tmp_path) == []


def test_the_page_says_what_each_precision_would_cost(tmp_path):
    record = domain(sites={})
    plain = write_report(made_up(record), tmp_path / "plain.html").read_text()
    assert "Validation accuracy" not in plain
    costs = {"float32": (602000, 95.1), "float16": (301234, 95.0), "int8": (199000, None)}
    record["results"]["storage"] = {
        name: {"bytes": size, "accuracy": accuracy} for name, (size, accuracy) in costs.items()
    }
    record["results"]["declined"] = True
    page = unescape(write_report(made_up(record), tmp_path / "r.html").read_text())
    rows = re.findall(r'<bdi>(float32|float16|int8)</bdi></th><td class="n">(.*?)</tr>', page)
    assert [name for name, _ in rows] == list(costs)
    assert ["602" in rows[0][1], "95.0" in rows[1][1], "–" in rows[2][1]] == [True] * 3
    assert "Validation was worse after tuning" in page
    assert "Validation was worse after tuning" not in unescape(plain)


# ── figures ──────────────────────────────────────────────────────────────────────────────────


def test_bars_of_the_ratio_are_as_high_as_the_ratio():
    eta = [0.5, 0.25, None, 1.0, 2.0]
    bars = re.findall(r'd="M[\d.]+ ([\d.]+)L[^"]*?L[\d.]+ ([\d.]+)z"', ratios(eta, "", "k"))
    heights = np.array([abs(float(a) - float(b)) for a, b in bars])
    np.testing.assert_allclose(heights / heights[0] * 0.5, [0.5, 0.25, 1.0, 2.0], atol=0.01)


def test_marks_of_the_accuracy_stand_where_the_accuracy_is():
    svg = accuracies([("a", [60, 70, None, 80]), ("b", [90, 95, 85, 100])], "", "k")
    x = [float(v) for v in re.findall(r'<use href="[^"]*" x="([\d.]+)"', svg)]
    accuracy = [60, 70, 80, 90, 95, 85, 100]
    slope, start = np.polyfit(accuracy, x, 1)
    assert slope > 0
    np.testing.assert_allclose(np.multiply(slope, accuracy) + start, x, atol=0.1)


def test_long_spectra_are_drawn_with_few_points_and_keep_their_ends():
    values = spectra_of(4096)
    curves = {name: curve(v) for name, v in values.items()}
    svg = spectrum(curves, {"x": 700, "y": 300}, 0.9, "", "k")
    assert len(svg) < 6000
    longest = max(re.findall(r'd="(M[^"]*)"', svg), key=len)
    assert longest.count("L") <= POINTS + 1
    assert curve([0.0, 0.0]).tolist() == [0]
    np.testing.assert_allclose(curve([3.0, 1.0]), [0, 75, 100])


def test_svgs_are_lean():
    text = page_of("four domains").html
    assert len(text) < 300_000
    for waste in ("DejaVu", "matplotlib", "<g ", "xlink", "metadata", "clip-path"):
        assert waste not in text


@pytest.mark.parametrize(
    ("text", "short"), [("short", "short"), ("x" * 30, "x" * 16 + "…"), ("猫" * 20, "猫" * 7 + "…")]
)
def test_long_names_are_shortened_by_the_room_they_take(text, short):
    assert shortened(text, 17) == short
    svg = accuracies([(text, (50.0, 60.0, 61.0, 62.0))], "about", "key")
    assert f">{short}</text>" in svg


def test_numbers_are_written_as_people_read_them():
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 99_949: "99.9 kB", 99_960: "100 kB"}
    sizes |= {301_234: "301 kB", 999_600: "1.0 MB", 18_608_032: "18.6 MB", 2e15: "2000 TB"}
    assert {n: size(n) for n in sizes} == sizes
    shares = {0: "0 %", 0.001: "< 0.01 %", 0.821: "0.82 %", 9.999: "10.0 %", 12.21: "12.2 %"}
    shares |= {99.96: "100 %", 1494.2: "1 494 %", None: "–"}
    assert {p: percent(p) for p in shares} == shares
    assert number(4652008) == "4 652 008"
    assert share(1, 0) == "–"


# ── files ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_same_facts_give_the_same_bytes(tmp_path):
    """In another process, with other hashes, and whatever matplotlib is set to."""
    import matplotlib

    here = write_report(joint(), tmp_path / "here.html").read_bytes()
    with matplotlib.rc_context({"font.size": 30, "grid.linestyle": "--", "svg.fonttype": "path"}):
        theirs = dict(matplotlib.rcParams)
        assert write_report(joint(), tmp_path / "again.html").read_bytes() == here
        assert dict(matplotlib.rcParams) == theirs
    code = "import sys, test_report as t; t.write_report(t.joint(), sys.argv[1])"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    there = tmp_path / "there.html"
    subprocess.run([sys.executable, "-c", code, str(there)], env=env, check=True)
    assert there.read_bytes() == here
    assert write_report(made_up(), tmp_path / "other.html").read_bytes() != here


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path):
    file = write_report(made_up(), tmp_path / "new" / "report.html")
    before = file.read_bytes()
    broken = made_up(domain())
    del broken["domains"][0]["results"]["dtype"]
    with pytest.raises(CovNormError, match=r"domain 'digits': incomplete .*dtype"):
        write_report(broken, file)
    with pytest.raises(CovNormError, match="the ecology's facts: incomplete"):
        write_report({"ecology": {}}, file)
    broken = made_up(domain())
    del broken["domains"][0]["results"]["denominators"]["convolutions"]
    with pytest.raises(CovNormError, match="the ecology's facts: incomplete"):
        write_report(broken, file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(CovNormError, match=str(tmp_path)):
        write_report(made_up(), tmp_path)


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_a_missing_library_is_named_with_its_remedy(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CovNormError, match=rf"needs {name}: pip install 'torch-covnorm\[report\]'"):
        write_report(made_up(), tmp_path / "report.html")
