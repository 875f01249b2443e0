"""What the command shows: tables and JSON on stdout, what happens and how far on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..report.wording import size as size
from ..training.progress import Progress as Step
from ..training.progress import Reporter

Cell = str | int | float | None


class Screen:
    """One command's output; `as_json` leaves only JSON on stdout, `quiet` only results."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def result(self, value: Any, *shown: Any) -> None:
        """The answer: the value as JSON, or these lines and tables for people."""
        if self.as_json:
            text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
            try:
                text.encode(sys.stdout.encoding or "utf-8")
            except UnicodeEncodeError:  # names of files may hold any bytes
                text = json.dumps(value, indent=1, allow_nan=False)
            print(text)
            return
        for part in shown:
            if isinstance(part, str):
                self.out.print(_printable(part), markup=False)
            else:  # as wide as it is: a cut number would be another number
                wide = self.out.options.update(max_width=10_000)
                self.out.print(part, width=Measurement.get(self.out, wide, part).maximum)

    def say(self, text: str) -> None:
        """What is happening, and why."""
        if not self.quiet:
            self.err.print(_printable(text), markup=False)

    @contextlib.contextmanager
    def reporting(self, named: bool = False) -> Iterator[Reporter]:
        """Bars with rate and time left, one a stage; sentences alone where there is no terminal.

        `named`: the work is on several domains, so each stage says which.
        """
        bars = Progress(
            TextColumn("  {task.description:9}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=self.err,
            disable=self.quiet or not self.err.is_terminal,
        )
        stages = _Stages(self, bars, named)
        with bars:
            yield Reporter(stages.begin, stages.training, stages.images)


class _Stages:
    """The bars of one command: each stage has its own."""

    def __init__(self, screen: Screen, bars: Progress, named: bool) -> None:
        self.screen, self.bars, self.named = screen, bars, named
        self.name = ""
        self.tasks: dict[str, TaskID] = {}
        self.start, self.first = 0.0, 0

    def begin(self, stage: str, why: str) -> None:
        self.name, self.tasks = stage, {}
        if not self.screen.quiet:
            self.bars.console.print(_printable(f"{stage:9} {why}"), markup=False)

    def images(self, done: int, total: int) -> None:
        if self.name not in self.tasks:
            self.start, self.first = time.perf_counter(), done
        rate = (done - self.first) / max(time.perf_counter() - self.start, 1e-9)
        self._update(self.name, done, total, f"{rate:.0f} images/s" if done > self.first else "")

    def training(self, step: Step) -> None:
        key = f"{step.stage} {step.domain}"
        if key not in self.tasks:
            why = WHY.get(step.stage, "")
            self.begin(step.stage, f"{step.domain}: {why}" if self.named else why)
        steps = step.steps or step.step
        notes = [] if step.loss is None else [f"loss {step.loss:.3f}"]
        notes += [] if step.accuracy is None else [f"validation {step.accuracy:.1f} %"]
        notes += [f"{step.images_per_second:.0f} images/s"] if step.images_per_second else []
        done, total = step.epoch * steps + step.step, step.epochs * steps
        self._update(key, done, total, ", ".join(notes))

    def _update(self, key: str, done: int, total: int, note: str) -> None:
        if key not in self.tasks:
            self.tasks[key] = self.bars.add_task(key.partition(" ")[0], total=total, note="")
        self.bars.update(self.tasks[key], completed=done, total=total, note=note)


WHY = {
    "collect": "n, mean and covariance of A's input, over the training images",
    "gradients": "what the loss feels at A's output, on a few hundred images",
    "normalize": "A ≈ C·M·W in closed form: how small may it be, by the validation images",
    "train": "adapters A, norms and head learn the task; the backbone stays frozen",
    "tune": "the small M, norms and head recover what the compression cost",
    "warm-up": "the new head alone, before everything moves",
}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """A table: text to the left, numbers to the right."""
    made = Table(title=title or None, title_justify="left", header_style="bold", box=None)
    for i, column in enumerate(columns):
        number = any(not isinstance(row[i], str) for row in rows) or column[-1:] == "%"
        made.add_column(column, justify="right" if number and i else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(_text(cell) for cell in row))
    return made


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return f"{cell:,}" if isinstance(cell, int) else _printable(cell).replace("[", r"\[")


def _printable(text: str) -> str:
    """Names of files may hold bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()
