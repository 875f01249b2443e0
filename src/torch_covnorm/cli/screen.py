"""What the command shows: tables and JSON on stdout, what happens and how far on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..progress import Progress as Step
from ..progress import Telling

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
            print(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))
            return
        for part in shown:
            self.out.print(part, markup=not isinstance(part, str))

    def say(self, text: str) -> None:
        """What is happening, and why."""
        if not self.quiet:
            self.err.print(text, markup=False)

    @contextlib.contextmanager
    def telling(self) -> Iterator[Telling]:
        """Bars with rate and time left, one a stage; sentences alone where there is no terminal."""
        bars = Progress(
            TextColumn("  {task.description:9}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=self.err,
            disable=self.quiet or not self.err.is_terminal,
        )
        stages = _Stages(self, bars)
        with bars:
            yield Telling(stages.begin, stages.training, stages.images)


class _Stages:
    """The bars of one command: each stage has its own."""

    def __init__(self, screen: Screen, bars: Progress) -> None:
        self.screen, self.bars = screen, bars
        self.name = ""
        self.tasks: dict[str, TaskID] = {}
        self.start, self.first = 0.0, 0

    def begin(self, stage: str, why: str) -> None:
        self.name, self.tasks = stage, {}
        if not self.screen.quiet:
            self.bars.console.print(f"{stage:9} {why}", markup=False)

    def images(self, done: int, total: int) -> None:
        if self.name not in self.tasks:
            self.start, self.first = time.perf_counter(), done
        rate = (done - self.first) / max(time.perf_counter() - self.start, 1e-9)
        self._update(self.name, done, total, f"{rate:.0f} images/s" if done > self.first else "")

    def training(self, step: Step) -> None:
        if step.stage not in self.tasks and step.stage in WHY:
            self.begin(step.stage, WHY[step.stage])
        steps = step.steps or step.step
        accuracy = "" if step.accuracy is None else f", validation {step.accuracy:.1f} %"
        note = f"loss {step.loss:.3f}{accuracy}, {step.images_per_second:.0f} images/s"
        self._update(step.stage, step.epoch * steps + step.step, step.epochs * steps, note)

    def _update(self, key: str, done: int, total: int, note: str) -> None:
        if key not in self.tasks:
            self.tasks[key] = self.bars.add_task(key, total=total, note="")
        self.bars.update(self.tasks[key], completed=done, total=total, note=note)


WHY = {
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


def size(count: float) -> str:
    """Bytes for people: 312 kB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit != "MB" else f"{count:.1f} MB"
        count /= 1000
    return f"{count:.1f} GB"


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return f"{cell:,}" if isinstance(cell, int) else cell.replace("[", r"\[")
