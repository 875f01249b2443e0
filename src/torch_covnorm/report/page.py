"""The page: all domains and each of them, laid out by ``template.html``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CovNormError
from . import figures
from .canvas import shortened
from .details import SPLITS, STAGES, details_of, row_of
from .wording import number, percent, plural, share, size

DETAILED = 24  # domains with figures of their own; every one is in the table


def render(facts: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names come from folders and files: they are text, never markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (number, size, percent, share, plural)
    named = {f.__name__: f for f in filters}
    environment.filters.update(named, svg=_markup, short=shortened)
    with _blame("the ecology's facts"):
        found = _overview(facts)
    found["details"] = []
    for i, record in enumerate(facts["domains"][:DETAILED], start=1):
        with _blame(f"domain {record.get('name')!r}"):
            found["details"].append(details_of(record, f"d{i}"))
    return environment.get_template("template.html").render(found)


@contextlib.contextmanager
def _blame(what: str) -> Iterator[None]:
    """What is missing or of the wrong kind inside is the fault of `what`."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise CovNormError(
            f"{what}: incomplete or malformed ({error!r}): see what `covnorm verify` finds"
        ) from error


def _overview(facts: Mapping[str, Any]) -> dict[str, Any]:
    ecology, bases, records = facts["ecology"], facts["bases"], facts["domains"]
    backbone, n = ecology["backbone"], len(records)
    total = sum(r["results"]["bytes"] for r in records) + sum(b["bytes"] for b in bases)
    rows = [row_of(r, f"d{i}") for i, r in enumerate(records, start=1)]
    few = rows[:DETAILED]
    charts = {}
    if few:
        about = "Accuracy by domain, in percent of the images: "
        parts = (f"{r['name']} {_said(r['accuracy']['final'])}" for r in few)
        stages = [(_label(r), list(r["accuracy"].values())) for r in few]
        charts["accuracy"] = figures.accuracies(stages, about + ", ".join(parts), "fa")
        bars = [(r["name"], 100 * r["adapter"] / max(r["ra"], 1), False) for r in few]
        ra = few[0]["ra"]
        bars += [(b["name"] + " (basis)", 100 * b["parameters"] / max(ra, 1), True) for b in bases]
        about = "Adapter parameters in percent of RA's: "
        parts = (f"{name} {part:.1f}" for name, part, _ in bars)
        charts["parameters"] = figures.parameters(bars, about + ", ".join(parts), "fp")
    return {
        "ecology": ecology,
        "backbone": backbone,
        "bases": [{**b, "span": _span(b["ranks"])} for b in bases],
        "rows": rows,
        "charts": charts,
        "total": {
            "bytes": total,
            "with_backbone": total + backbone["bytes"],
            "copies": n * backbone["bytes"],
            "parameters": sum(r["adapter"] for r in rows) + sum(b["parameters"] for b in bases),
        },
        "left_out": facts.get("left_out", []),
        "limit": DETAILED,
        "STAGES": STAGES,
        "SPLITS": SPLITS,
    }


def _label(row: Mapping[str, Any]) -> str:
    """Validation is never shown as if it were test."""
    name: str = row["name"]
    return name if row["on"] == "test" else f"{shortened(name, 9)} ({row['on']})"


def _span(ranks: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    if not ranks:
        return None
    kx, ky = zip(*ranks.values(), strict=True)
    return {"layers": len(kx), "kx": (min(kx), max(kx)), "ky": (min(ky), max(ky))}


def _said(p: float | None) -> str:
    return "not measured" if p is None else f"{p:.1f}"


def _markup(text: str) -> Any:
    """Our own SVG, whose texts are escaped already."""
    from markupsafe import Markup

    return Markup(text)
