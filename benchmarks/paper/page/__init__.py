"""docs/results.md and docs/results.html from the rows of the benchmark."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ...ledger import Lines
from ..settings import PIXELS
from . import charts, decathlon, drawing, metrics, reproduced, smallest, tables, text, training
from .blocks import Block, Figure, Heading, Text
from .claims import claims
from .rows import Row, Rows

DOCS = Path(__file__).parents[3] / "docs"


def render(rows: Iterable[Row]) -> dict[str, str]:
    """{file below docs/: its text}: the page twice, and the figures of the Markdown."""
    found = Rows(rows)
    blocks = _blocks(found)
    made = {"results.md": _markdown(blocks), "results.html": _html(blocks)}
    for block in blocks:
        if isinstance(block, Figure):
            for name, svg in block.panels.items():
                made[f"results/{name}.svg"] = drawing.alone(svg)
    return made


def write() -> None:
    """Make the files of docs/ anew, from all that was measured."""
    made = render(Lines("paper").rows)
    shutil.rmtree(DOCS / "results", ignore_errors=True)  # a figure that is no more
    for name, content in made.items():
        file = DOCS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        print(file)


def _blocks(found: Rows) -> list[Block]:
    table2 = decathlon.table(found)
    blocks: list[Block | None] = [
        *text.opening(found),
        Heading("What the paper says, and what came out here"),
        reproduced.table(found),
        *text.verdicts(claims(found)),
        *text.set_up(),
        Heading("Table 1: every method on every domain"),
        tables.first(found),
        charts.table1(found),
        tables.sizes(found),
        Heading("Accuracy against parameters"),
        charts.by_parameters(found) or _later("parameters"),
        Heading("What M starts as"),
        tables.starts(found),
        Heading("Variance or loss: ranks in one budget"),
        Text(text.LOSS),
    ]
    for backbone in metrics.backbones(found):
        blocks += [
            Heading(backbone, 3),
            metrics.table(found, backbone),
            charts.by_metric(found, backbone),
            metrics.gains(found, backbone),
        ]
    blocks += [
        Heading("The smallest file", 3),
        smallest.table(found),
        Heading("Shared bases in three ways"),
        metrics.shared(found),
        Heading("Effective dimensions"),
        charts.eta(found) or _later("dimensions"),
        charts.explained(found),
        Heading("Table 2: a mini-Decathlon"),
        table2,
        Text(text.DECATHLON) if table2.whole else None,
        Heading("Is RA trained well enough?"),
        training.trained(found),
        Heading("The same cell twice"),
        training.again(found) or _later("again"),
        Heading("Learning rates that were tried"),
        *(training.tried(found, backbone) for backbone in PIXELS),
    ]
    return [block for block in blocks if block is not None]


def _later(piece: str) -> Text:
    return Text(f"Not run yet: `python -m benchmarks.paper {piece}`.")


def _markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(block.markdown() for block in blocks) + "\n"


def _html(blocks: Sequence[Block]) -> str:
    """One file that asks for nothing else, in the look of the ecology's report."""
    sheet = files("torch_covnorm.report").joinpath("template.html").read_text(encoding="utf-8")
    style = sheet[sheet.index("<style>") : sheet.index("</style>")]
    title, body = blocks[0], blocks[1:]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    inner = "\n".join(block.html() for block in body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>torch-covnorm: {escape(text.TITLE)}</title>\n{style}{OWN}</style>\n</head>\n"
        f"<body>\n<header>\n{title.html()}\n</header>\n<main>\n{inner}\n</main>\n</body>\n</html>\n"
    )


# Beyond the report's sheet: a page of sections without cards, and wider tables.
OWN = """
main > h2 { margin: 3.6rem 0 1rem; } main > ul { padding-left: 1.2rem; max-width: 72ch; }
main > ul > li { margin: .55rem 0; }
main > .scroll, main > .columns, main > .panels { margin-top: 1.2rem; }
main > .scroll table { font-size: .86rem; } main > .scroll .n { padding-left: .9rem; }
main > .columns > figure:only-child { max-width: 32rem; }
body { max-width: 68rem; } details ul { padding-left: 1.2rem; font-size: .84rem; }
"""
