"""The report in a real browser: no console errors, dark mode, no wider than its window."""

from __future__ import annotations

import re
from pathlib import Path

import chromium
import pytest
from report_facts import CASES, hostile, joint

from torch_covnorm.report import write_report

pytestmark = pytest.mark.skipif(chromium.find() is None, reason=chromium.MISSING)

WIDTH = 360
TELL = "<script>parent.postMessage([name, document.documentElement.scrollWidth], '*')</script>"
LISTEN = "<script>onmessage = e => document.body.append(` ${e.data[0]}=${e.data[1]};`)</script>"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(joint(), tmp_path_factory.mktemp("report") / "report.html")


def brightness(picture: Path) -> float:
    from PIL import Image

    with Image.open(picture) as image:
        grey = image.convert("L").resize((64, 64))
    return sum(grey.tobytes()) / 64**2


def test_the_report_opens_without_a_complaint_light_and_dark(report, tmp_path):
    light, dark, pdf = tmp_path / "light.png", tmp_path / "dark.png", tmp_path / "report.pdf"
    page = chromium.visit(report, screenshot=light, pdf=pdf)
    assert page.console == []
    assert "<h1><bdi>house</bdi></h1>" in page.dom
    assert chromium.visit(report, dark=True, screenshot=dark).console == []
    assert brightness(light) > 200
    assert brightness(dark) < 60
    assert pdf.read_bytes().startswith(b"%PDF")


def test_control_a_broken_script_is_a_complaint(tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text("<!doctype html><h1>x</h1><script>\nnothing.there()\n</script>")
    page = chromium.visit(broken)
    assert "<h1>x</h1>" in page.dom
    assert len(page.console) == 1
    assert "nothing is not defined" in page.console[0]


def test_no_script_of_a_hostile_name_runs(tmp_path):
    """Names are inserted as text; otherwise the page's security policy would block scripts."""
    file = write_report(hostile(), tmp_path / "hostile.html")
    assert chromium.visit(file).console == []
    html = file.read_text()
    assert html.count("</main>") == 1
    file.write_text(html.replace("</main>", "<script>document.title = 'run'</script></main>"))
    page = chromium.visit(file)
    assert "<title>run</title>" not in page.dom
    assert any("Content Security Policy" in line for line in page.console)


def test_the_report_is_no_wider_than_a_small_telephone(tmp_path):
    """Each page is measured in a frame, by a script in a copy without the security policy."""
    frames = []
    cases = {"joint": joint, "many": CASES["1000 classes"], "hostile": hostile}
    for name, facts in cases.items():
        html = write_report(facts(), tmp_path / f"{name}.html").read_text()
        html, n = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
        assert n == 1
        (tmp_path / f"{name}.html").write_text(html + TELL)
        frames.append(name)
    wide = f"<!doctype html><div style='width:{WIDTH + 99}px'>x</div>{TELL}"
    (tmp_path / "control.html").write_text(wide)
    body = "".join(
        f'<iframe name="{n}" src="{n}.html" style="border:0;width:{WIDTH}px"></iframe>'
        for n in (*frames, "control")
    )
    (tmp_path / "frames.html").write_text(f"<!doctype html><body>{LISTEN}{body}")
    dom = chromium.visit(tmp_path / "frames.html", wait=3).dom
    widths = {name: int(n) for name, n in re.findall(r" (\w+)=(\d+);", dom)}
    assert widths.pop("control") > WIDTH
    assert widths == dict.fromkeys(cases, WIDTH)
