"""docs/results.md and its figures, from the rows of the benchmark."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import jinja2

import torch_covnorm as cn

from ... import domains, fetch
from ...ledger import Lines
from .. import compare, keys, profiles, published, settings
from ..rows import Key, Row, Rows
from . import figures, numbers, tables, verdicts

DOCS = Path(__file__).parents[3] / "docs"
# What a block of the template needs beyond the rows.
DEFAULTS = {"brief": False, "archive": None, "backbone": "efficientnet-lite0"}


def render(lines: Iterable[Row]) -> dict[str, str]:
    """Return {file in docs/: its text}: the page and its figures."""
    rows = Rows(lines)
    drawn = figures.draw(rows)
    context = {"rows": rows, "figures": drawn, "claims": verdicts.claims(rows), **DEFAULTS}
    made = {"results.md": _tidy(_template().render(context))}
    return made | {f"results/{name}.svg": figure["svg"] for name, figure in drawn.items()}


def section(name: str, rows: Rows, **context: Any) -> str:
    """Return one block of the page; `brief` is for a terminal: only methods that have rows."""
    template = _template()
    block = template.blocks[name](template.new_context({**DEFAULTS, "rows": rows, **context}))
    return _tidy("".join(block))


def write() -> None:
    """Write the files in docs/ from all results."""
    made = render(Lines("paper").rows)
    shutil.rmtree(DOCS / "results", ignore_errors=True)  # figures that are no longer made
    for name, content in made.items():
        file = DOCS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        print(file)


def row_keys(used: Iterable[Key], what: str = "table") -> str:
    """List the keys of a table's rows, folded away, as the lines of the file spell them."""
    used = list(used)
    items = "".join(f"<li><code>{escape(pointer(k), quote=False)}</code></li>\n" for k in used)
    where = f'Lines with <code>"backbone": "{used[0]["backbone"]}"</code> and one of:'
    summary = f"<summary>The rows of this {what}</summary>"
    return f"\n<details>{summary}\n<p>{where}</p>\n<ul>\n{items}</ul>\n</details>\n"


def pointer(key: Key) -> str:
    """Return a key as its lines in the file spell it, to search for."""
    return json.dumps({k: v for k, v in key.items() if k != "backbone"}, ensure_ascii=False)[1:-1]


def _tidy(text: str) -> str:
    """Leave one blank line after headings, never more than one, and no trailing spaces."""
    text = re.sub(r"^(#+ .*)$", r"\1\n", re.sub(r" +\n", "\n", text), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for module in (profiles, published, keys, compare, numbers, tables):  # `profiles`: every piece
        environment.globals.update(vars(module))
    modules = {"cn": cn, "domains": domains, "settings": settings, "verdicts": verdicts}
    environment.globals.update(modules, fetch=fetch, row_keys=row_keys)
    return environment.get_template("results.md.j2")
