"""Headless Chromium by its command line: console, DOM and screenshot of a page."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (  # a machine without a screen, and in a container
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--no-first-run"),
)
MISSING = f"no Chromium on this machine: none of {', '.join(NAMES)} is on PATH"
# [pid:tid:date/time:LEVEL:CONSOLE:line] "message", source: address (line)
CONSOLE = re.compile(r':CONSOLE[:(]\d+\)?\] "(.*?)", source: \S* \(\d+\)', re.S)


@dataclass(frozen=True)
class Page:
    """A page after its scripts ran: its DOM as HTML, and its console messages."""

    dom: str
    console: list[str]


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def visit(
    address: str | Path,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    screenshot: Path | None = None,
    pdf: Path | None = None,
    wait: float = 0,
    timeout: float = 90,
) -> Page:
    """Open a file or an address; take a screenshot and print a PDF if paths are given.

    A window has at least 500 pixels; use `narrow` for less.

    Args:
        wait: seconds of the page's clock before it is read, for scripts that need time.
        timeout: seconds of real time.
    """
    program = find()
    assert program is not None, MISSING
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            *FLAGS,
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]
        if screenshot is not None:
            flags.append(f"--screenshot={screenshot}")
        if pdf is not None:
            flags += ["--no-pdf-header-footer", f"--print-to-pdf={pdf}"]
        if wait:
            flags.append(f"--virtual-time-budget={1000 * wait:.0f}")
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        command = [program, *flags, "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"Chromium ended with {done.returncode}: {done.stderr[-2000:]}"
    for made in (screenshot, pdf):
        assert made is None or made.exists(), f"Chromium made no {made}: {done.stderr[-2000:]}"
    return Page(done.stdout, CONSOLE.findall(done.stderr))


def narrow(page: Path, width: int, folder: Path, height: int = 900) -> Path:
    """Write a page that shows another one in a frame of that width."""
    file = folder / f"narrow-{width}.html"
    style = f"border:0;width:{width}px;height:{height}px"
    file.write_text(
        f'<!doctype html><body style="margin:0"><iframe src="{page.resolve().as_uri()}" '
        f'style="{style}"></iframe>'
    )
    return file
