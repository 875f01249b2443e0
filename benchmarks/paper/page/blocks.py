"""What a page is made of, as Markdown and as HTML: headings, text, lists, tables, figures.

Texts are Markdown of the smallest kind: `code`, **bold** and [links](to/files).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape


@dataclass(frozen=True)
class Heading:
    """`level` 1 is the page's title."""

    text: str
    level: int = 2

    def markdown(self) -> str:
        return f"{'#' * self.level} {self.text}"

    def html(self) -> str:
        return f"<h{self.level}>{inline(self.text)}</h{self.level}>"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str

    def markdown(self) -> str:
        return self.text

    def html(self) -> str:
        return f"<p>{inline(self.text)}</p>"


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self) -> str:
        return "<ul>\n" + "\n".join(f"<li>{inline(i)}</li>" for i in self.items) + "\n</ul>"


@dataclass(frozen=True)
class Table:
    """Cells are texts; the columns `left` are set left, the others right.

    made_of: the rows that it comes from, each as `said`; run: cells that were run, and of how many.
    """

    caption: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    backbone: str = ""
    made_of: Sequence[str] = ()
    run: tuple[int, int] | None = None
    left: Sequence[int] = (0,)

    def markdown(self) -> str:
        marks = [":--" if i in self.left else "--:" for i in range(len(self.head))]
        lines = [self.head, marks, *self.body]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        rows = folded("table", self.backbone, self.made_of)
        return "\n\n".join(part for part in (table, self._about(), rows) if part)

    def html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            tags = ["th" if tag == "th" or i == 0 else "td" for i in range(len(cells))]
            kinds = ["" if i in self.left else ' class="n"' for i in range(len(cells))]
            scopes = [
                f' scope="{"col" if tag == "th" else "row"}"' if t == "th" else "" for t in tags
            ]
            parts = zip(tags, scopes, kinds, cells, strict=True)
            return "<tr>" + "".join(f"<{t}{s}{k}>{inline(c)}</{t}>" for t, s, k, c in parts)

        wide = ' class="wide"' if len(self.head) > 5 else ""
        body = "\n".join(line(cells, "td") + "</tr>" for cells in self.body)
        label = escape(re.sub(r"[`*]", "", self.caption.partition(".")[0]))
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">\n'
            f"<table{wide}>\n<caption><span>{inline(self._about())}</span></caption>\n"
            f"<thead>{line(self.head, 'th')}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
            f"</table>\n</div>\n{folded('table', self.backbone, self.made_of)}"
        )

    @property
    def whole(self) -> bool:
        """Whether all its cells were run."""
        return self.run is None or self.run[0] >= self.run[1]

    def _about(self) -> str:
        return " ".join([self.caption, missing(*self.run)] if self.run else [self.caption])


@dataclass(frozen=True)
class Figure:
    """One or several panels {name of its file: SVG}; `kind` is "panels" for small ones.

    made_of: as of a `Table`; none where the rows are those of the table beside it.
    """

    caption: str
    panels: dict[str, str] = field(default_factory=dict)
    kind: str = "columns"
    backbone: str = ""
    made_of: Sequence[str] = ()

    def markdown(self) -> str:
        about = {name: _label(svg) for name, svg in self.panels.items()}
        shown = "\n".join(f"![{about[name]}](results/{name}.svg)" for name in self.panels)
        rows = folded("figure", self.backbone, self.made_of)
        return "\n\n".join(part for part in (shown, self.caption, rows) if part)

    def html(self) -> str:
        rows = folded("figure", self.backbone, self.made_of)
        caption = f"<figcaption>{inline(self.caption)}</figcaption>"
        if len(self.panels) == 1:
            svg = next(iter(self.panels.values()))
            return f'<div class="columns"><figure>{svg}{caption}</figure></div>\n{rows}'
        shown = "\n".join(f"<figure>{svg}</figure>" for svg in self.panels.values())
        below = f'<p class="quiet">{inline(self.caption)}</p>'
        return f'<div class="{self.kind}">\n{shown}\n</div>\n{below}\n{rows}'


Block = Heading | Text | Items | Table | Figure


def folded(what: str, backbone: str, made_of: Sequence[str]) -> str:
    """What to search the results for, folded away; GitHub shows this piece of HTML too."""
    if not made_of:
        return ""
    keys = "".join(f"\n<li><code>{escape(m, quote=False)}</code></li>" for m in made_of)
    where = f'Lines with <code>"backbone": "{escape(backbone)}"</code> and one of:'
    return (
        f"<details><summary>The rows of this {what}</summary>\n<p>{where}</p>\n"
        f"<ul>{keys}\n</ul>\n</details>"
    )


def missing(have: int, wanted: int) -> str:
    """How much of a table was run."""
    if not wanted:
        return "No cell was run."
    return "All cells were run." if have >= wanted else f"{have} of {wanted} cells were run."


def inline(text: str) -> str:
    """The small Markdown of a text as HTML."""
    parts = re.split(r"(`[^`]*`)", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"<code>{escape(part[1:-1], quote=False)}</code>"
            continue
        part = escape(part, quote=False)
        part = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", part)
        parts[i] = re.sub(r"\[(.+?)\]\((.+?)\)", r'<a href="\2">\1</a>', part)
    return "".join(parts)


def _label(svg: str) -> str:
    found = re.search(r'aria-label="([^"]*)"', svg)
    return found[1].replace("]", ")").replace("[", "(") if found else ""
