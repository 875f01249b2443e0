"""The server's page in a real browser: images, domains, errors, keyboard, narrow windows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from driver import Tab, tab
from serve import houses
from serve.server import Server, running
from small_ecology import facts

from torch_covnorm.ecology import Details

pytest.importorskip("fastapi")
pytestmark = pytest.mark.skipif(chromium.find() is None, reason=chromium.MISSING)
HOSTILE = ("<img src=x onerror='window.hurt=1'>", "<script>window.hurt=2</script>")
ANSWERED = "!document.getElementById('result').hidden"
PROBLEM = (
    "!document.getElementById('problem').hidden && document.getElementById('problem').textContent"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    ecology = houses.house(tmp_path_factory.mktemp("page") / "house")
    net = ecology.network()
    preprocessing = {"size": 32, "fit": "squash", **houses.NORMALIZATION}
    net.add_domain("hostile", list(HOSTILE), "none", preprocessing=preprocessing)
    ecology.put(net, {"hostile": Details(facts())})
    with running(ecology.folder, "--deadline", 30) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with tab() as page:
        yield page


@pytest.fixture
def page(server: Server, browser: Tab) -> Tab:
    browser.open(server.address)
    browser.until("document.getElementById('domain').options.length > 3")
    browser.console.clear()
    return browser


@pytest.fixture
def image(tmp_path) -> Path:
    file = tmp_path / "rose.png"
    file.write_bytes(houses.picture())
    return file


def choose(page: Tab, domain: str) -> None:
    page.run(
        f"(() => {{ const s = document.getElementById('domain'); s.value = {json.dumps(domain)};"
        " s.dispatchEvent(new Event('change')); })()"
    )


def text(page: Tab, name: str) -> str:
    return str(page.run(f"document.getElementById('{name}').textContent"))


def test_a_dropped_image_shows_predictions_time_and_batch(page, server, image):
    choose(page, "roses")
    page.drop("#drop", image)
    page.until(ANSWERED)
    label, probability = server.predict("roses", image.read_bytes()).best
    assert text(page, "best") == label
    assert f"{100 * probability:.1f} %" in text(page, "bars")
    assert "in roses" in text(page, "which")
    assert "batch of 1 image from 1 domain" in text(page, "timing")
    assert page.run("document.querySelectorAll('#bars li').length") == 5
    width = page.run("document.querySelector('#bars i').getBoundingClientRect().width")
    track = page.run("document.querySelector('#bars .bar').getBoundingClientRect().width")
    assert width == pytest.approx(track * probability, abs=1.5)
    assert page.console == []


def test_another_domain_predicts_the_same_image_again(page, server, image):
    choose(page, "roses")
    page.choose("#file", image)
    page.until(ANSWERED)
    choose(page, "coins")
    page.until("document.getElementById('which').textContent.includes('coins')")
    assert text(page, "best") == server.predict("coins", image.read_bytes()).best[0]


def test_the_list_shows_every_domain_and_the_tiles_are_live(page, server):
    shown = page.run("[...document.querySelectorAll('#domains tr')].map(r => r.cells[0].innerText)")
    assert shown == [d["domain"] for d in server.get("/v1/domains").json["domains"]]
    page.until("document.getElementById('rate').textContent !== '–'")
    assert text(page, "count") == str(len(shown))
    assert "ready" in text(page, "state")


def test_a_file_that_is_not_an_image_is_an_error_and_the_next_one_is_predicted(
    page, tmp_path, image
):
    choose(page, "roses")
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not an image at all")
    page.choose("#file", bad)
    assert "image" in page.until(PROBLEM)
    assert page.run("document.getElementById('result').hidden")
    page.choose("#file", image)
    page.until(ANSWERED)
    assert page.run("document.getElementById('problem').hidden")


def test_auto_shows_the_guessed_domain_or_that_none_fits(page, image, tmp_path):
    choose(page, "auto")
    page.choose("#file", image)
    page.until(ANSWERED)
    assert "in clipart (guessed, " in text(page, "result")
    stripes = tmp_path / "stripes.png"
    stripes.write_bytes(houses.stripes())
    page.choose("#file", stripes)
    assert "auto" in page.until(PROBLEM)


def test_it_can_be_used_by_keyboard_only(page, image):
    page.run("document.body.focus()")
    page.key("Tab")
    assert page.run("document.activeElement.id") == "file"
    page.choose("#file", image)
    page.key("Tab")
    assert page.run("document.activeElement.id") == "domain"
    first = page.run("document.activeElement.value")
    page.key("ArrowDown")
    page.until(f"document.getElementById('domain').value !== {json.dumps(first)}")
    page.until(ANSWERED)


@pytest.mark.parametrize("width", [360, 1200])
def test_no_wider_than_its_window(server, browser, image, width):
    browser.open(server.address, width=width, height=800)
    browser.until("document.getElementById('domain').options.length > 3")
    choose(browser, "roses")
    browser.choose("#file", image)
    browser.until(ANSWERED)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_labels_are_text_and_never_markup(page, image):
    choose(page, "hostile")
    page.choose("#file", image)
    page.until("document.getElementById('which').textContent.includes('hostile')")
    assert text(page, "best") in HOSTILE
    assert page.run("window.hurt === undefined")
    assert page.run("document.querySelectorAll('#result img').length") == 0


def test_the_page_says_when_the_server_is_gone(tmp_path):
    ecology = houses.create(tmp_path / "house")
    houses.put(ecology, "one")
    with tab() as page:
        with running(ecology.folder, "--deadline", 30) as server:
            page.open(server.address)
            page.until("document.getElementById('domain').options.length > 1")
        page.until("document.getElementById('state').textContent.includes('does not respond')")


def test_it_contacts_no_other_host(page, server):
    names = page.run("performance.getEntriesByType('resource').map(r => new URL(r.name).host)")
    assert set(names) <= {f"{server.host}:{server.port}"}
