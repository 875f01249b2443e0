"""The page of this benchmark, docs/strangers.md: tables and verdicts, made of the rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..markers import filled
from ..paper.page.numbers import NONE, number, share, signed, with_error
from .cells import METHODS
from .folders import SIZES
from .readers import STRANGERS
from .statistics import PLANNED, Cell, Row, by_method, common, difference, error, paired

DOCS = Path(__file__).parents[2] / "docs" / "strangers.md"
BEGIN, END = "<!-- made by `python -m benchmarks.strangers table` -->", "<!-- end -->"
NAMES = {"covnorm": "`covnorm add`", "probe": "probe", "finetune": "fine-tuning", "lora": "LoRA"}
OURS, *NEIGHBOURS = METHODS
Found = Mapping[str, Mapping[Cell, Row]]


def render(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the tables of these rows between its markers."""
    return filled(page, BEGIN, END, tables(rows))


def tables(rows: Sequence[Row]) -> str:
    """Return every table as Markdown."""
    parts = ["## Data sets", _datasets()]
    for backbone in sorted({row["backbone"] for row in rows}):
        found = by_method(rows, backbone)
        parts += [f"## {backbone}", _progress(found), "### Verdicts"]
        parts += ["\n".join(f"- {line}" for line in verdicts(found))]
        parts += ["### Means and costs", _costs(found), "### Test accuracy", _accuracies(found)]
    return "\n\n".join(parts)


def _datasets() -> str:
    def lines() -> Iterator[Sequence[str]]:
        for name, s in STRANGERS.items():
            packages = ", ".join(f"`{p.spec}` ({p.registry}; {p.licence})" for p in s.packages)
            sizes = ", ".join(str(size) for size in SIZES if size <= s.train)
            yield name, s.what, s.sources, sizes, packages

    return _table(("data set", "images", "split by", "per class", "packages"), lines())


def _progress(found: Found) -> str:
    done = (f"{NAMES[m]} {sum(c in cells for c in PLANNED)}" for m, cells in found.items())
    n = len(common(found))
    return (
        f"Of {len(PLANNED)} cells were run: {', '.join(done)}. Means are over the {n} cells that "
        "all methods with any result have."
    )


def _accuracies(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for cell in PLANNED:
            present = [cells[cell] for cells in found.values() if cell in cells]
            n = str(present[0]["n"]) if present else NONE
            yield cell[0], str(cell[1]), n, *(_accuracy(found[m].get(cell)) for m in METHODS)
        means = (f"**{number(mean(found, m))}**" for m in METHODS)
        yield "**mean**", "", "", *means

    columns = ("data set", "per class", "test images", *NAMES.values())
    return _table(columns, lines())


def _accuracy(row: Row | None) -> str:
    return NONE if row is None else with_error(row["accuracy"], error(row))


def _costs(found: Found) -> str:
    base = total(found, "finetune", "seconds")

    def lines() -> Iterator[Sequence[str]]:
        for m in METHODS:
            gap = None
            if m != OURS and found[OURS]:
                gap = difference(found[OURS], found[m], common(found)) if found[m] else None
            seconds = total(found, m, "seconds")
            yield (
                NAMES[m],
                number(mean(found, m)),
                NONE if gap is None else f"{signed(gap.mean)} ({_ends(gap.low, gap.high)})",
                number(kilobytes(found, m), ",.0f"),
                share(kilobytes(found, m), kilobytes(found, "lora")),
                NONE if not seconds or not base else f"{seconds / base:.2f}",
                number(next((r["lines"] for r in found[m].values()), None), "d"),
            )

    columns = (
        *("method", "mean accuracy %", "`covnorm add` over it (95 % interval)", "kB per task"),
        *("of LoRA's", "seconds, of fine-tuning's", "lines of code"),
    )
    return _table(columns, lines())


def verdicts(found: Found) -> list[str]:
    """Judge the numbers to reach, each of which needs every cell of the methods it compares."""
    return [
        f"{goal}: **{'met' if met else 'missed'}**, {facts}."
        if all(len(found[m]) == len(PLANNED) for m in (OURS, *others))
        else f"{goal}: not run yet{f'; so far {facts}' if facts and common(found) else ''}."
        for goal, others, (met, facts) in (
            (
                "Not below the probe by more than one standard error in any cell",
                ("probe",),
                _against_probe(found),
            ),
            (
                "The mean is at least that of the best neighbour − 0.3 points",
                NEIGHBOURS,
                _against_best(found),
            ),
            (
                "Files are at most a fifth of LoRA's",
                ("lora",),
                _at_most(kilobytes(found, OURS), kilobytes(found, "lora"), 0.2),
            ),
            (
                "Time is at most 1.5 × that of fine-tuning",
                ("finetune",),
                _at_most(total(found, OURS, "seconds"), total(found, "finetune", "seconds"), 1.5),
            ),
        )
    ]


def _against_probe(found: Found) -> tuple[bool, str]:
    """Compare with the probe's standard error, and count what the stricter paired one says."""
    below, clearly = [], 0
    for cell in common(found):
        if cell in found[OURS] and cell in found["probe"]:
            gap, off = paired(found[OURS][cell], found["probe"][cell])
            clearly += gap < -off - 1e-9
            if gap < -error(found["probe"][cell]):
                below.append(f"{cell[0]} at {cell[1]} ({signed(gap)})")
    facts = f"below in {', '.join(below)}" if below else "in none"
    return not below, f"{facts}; by more than the error of the paired difference in {clearly}"


def _against_best(found: Found) -> tuple[bool, str]:
    means = {m: mean(found, m) for m in METHODS}
    known = {m: v for m, v in means.items() if v is not None and m != OURS}
    ours = means[OURS]
    if ours is None or not known:
        return False, ""
    best = max(known, key=lambda m: known[m])
    facts = f"{ours:.1f} beside {known[best]:.1f} of {NAMES[best]}"
    return ours >= known[best] - 0.3, facts


def _at_most(ours: float | None, theirs: float | None, times: float) -> tuple[bool, str]:
    if ours is None or not theirs:
        return False, ""
    return ours <= times * theirs, f"{ours / theirs:.2f} ×"


def mean(found: Found, method: str) -> float | None:
    """Return the mean accuracy over the cells that all methods have."""
    return _mean(found, method, "accuracy")


def kilobytes(found: Found, method: str) -> float | None:
    """Return the mean size of what is stored for a task."""
    size = _mean(found, method, "bytes")
    return None if size is None else size / 1000


def total(found: Found, method: str, key: str) -> float | None:
    """Return a sum over the cells that all methods have."""
    average = _mean(found, method, key)
    return None if average is None else average * len(common(found))


def _mean(found: Found, method: str, key: str) -> float | None:
    values = [found[method][cell][key] for cell in common(found) if cell in found[method]]
    return statistics.fmean(values) if values else None


def _ends(low: float, high: float) -> str:
    return f"{signed(low)} to {signed(high)}"


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
