"""The page about an ecology, laid out by ``template.html``: an overview and each domain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CovNormError
from . import figures
from .details import SPLITS, STAGES, details_of, row_of
from .wording import number, percent, plural, share, shortened, size

MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
DETAILED = 24  # domains with a section of their own; the table lists all


def render(facts: Mapping[str, Any]) -> str:
    """Return the page as HTML text."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names come from folders and files: they are text, never markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = {f.__name__: _unbroken(f) for f in (number, size, percent, share)}
    # The texts in our own SVG are escaped already.
    environment.filters.update(numbers, plural=plural, short=shortened, svg=Markup)
    with _blame("the ecology's facts"):
        view = _overview(facts)
    view["details"] = []
    for record, row in zip(facts["domains"][:DETAILED], view["rows"], strict=False):
        with _blame(f"domain {record.get('name')!r}"):
            view["details"].append(details_of(record, row))
    with _blame("the ecology's facts", (*MALFORMED, jinja2.UndefinedError)):
        return environment.get_template("template.html").render(view)


def _unbroken(write: Callable[..., str]) -> Callable[..., str]:
    """Return a filter whose text has no place for a line break."""
    return lambda *args: write(*args).replace(" ", "\u00a0")


@contextlib.contextmanager
def _blame(what: str, errors: tuple[type[Exception], ...] = MALFORMED) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise CovNormError(
            f"{what}: incomplete or malformed ({error!r}): run `covnorm verify`"
        ) from error


def _overview(facts: Mapping[str, Any]) -> dict[str, Any]:
    ecology, bases, records = facts["ecology"], facts["bases"], facts["domains"]
    backbone = ecology["backbone"]
    total = sum(r["results"]["bytes"] for r in records) + sum(b["bytes"] for b in bases)
    rows = [row_of(r, f"d{i}") for i, r in enumerate(records, start=1)]
    return {
        "ecology": ecology,
        "backbone": backbone,
        "bases": [{**b, "span": _span(b["ranks"])} for b in bases],
        "rows": rows,
        "charts": _charts(rows[:DETAILED], bases) if rows else {},
        "total": {
            "bytes": total,
            "with_backbone": total + backbone["bytes"],
            "copies": len(records) * backbone["bytes"],
            "parameters": sum(r["adapter"] for r in rows) + sum(b["parameters"] for b in bases),
        },
        "left_out": facts.get("left_out", []),
        "limit": DETAILED,
        "STAGES": STAGES,
        "SPLITS": SPLITS,
    }


def _charts(
    rows: Sequence[Mapping[str, Any]], bases: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    finals = ((row["name"], row["accuracy"]["final"]) for row in rows)
    listed = (f"{name} {'not measured' if p is None else f'{p:.1f}'}" for name, p in finals)
    label = f"Accuracy by domain, in percent of the images: {', '.join(listed)}"
    stages = [
        (n if on == "test" else f"{shortened(n, 9)} ({on})", list(accuracy.values()))
        for n, on, accuracy in ((row["name"], row["on"], row["accuracy"]) for row in rows)
    ]
    ra = max(rows[0]["denominators"]["ra"], 1)
    bars = [(row["name"], 100 * row["adapter"] / ra, False) for row in rows]
    bars += [(f"{b['name']} (basis)", 100 * b["parameters"] / ra, True) for b in bases]
    shares = ", ".join(f"{name} {part:.1f}" for name, part, _ in bars)
    shares = f"Adapter parameters in percent of RA's: {shares}"
    return {
        "accuracy": figures.accuracies(stages, label, "fa"),
        "parameters": figures.parameters(bars, shares, "fp"),
    }


def _span(ranks: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    if not ranks:
        return None
    kx, ky = zip(*ranks.values(), strict=True)
    return {"layers": len(kx), "kx": (min(kx), max(kx)), "ky": (min(ky), max(ky))}
