"""What the command prints: results on stdout, messages and progress on stderr."""

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

from ..training.progress import Progress as Step
from ..training.progress import Reporter

Cell = str | int | float | None


class Screen:
    """The output of one command.

    as_json: print results as JSON. quiet: print no messages and no progress.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def result(self, value: Any, *shown: Any) -> None:
        """Print the result: `value` as JSON, or `shown`, lines and tables for people."""
        if self.as_json:
            text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
            try:
                text.encode(sys.stdout.encoding or "utf-8")
            except UnicodeEncodeError:  # file names may contain any bytes
                text = json.dumps(value, indent=1, allow_nan=False)
            print(text)
            return
        for part in shown:
            if isinstance(part, str):
                self.out.print(_printable(part), markup=False)
            else:  # at full width: a truncated number would be wrong
                unlimited = self.out.options.update(max_width=10_000)
                needed = Measurement.get(self.out, unlimited, part).maximum
                self.out.width = max(self.out.width, needed)
                self.out.print(part)

    def info(self, text: str) -> None:
        """Print a message about what is happening, unless quiet."""
        if not self.quiet:
            self.err.print(_printable(text), markup=False)

    @contextlib.contextmanager
    def reporting(self, named: bool = False) -> Iterator[Reporter]:
        """Report progress: one line per stage, and on a terminal a bar with rate and time left.

        named: prefix each stage with its domain, for work on several domains.
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
    """The progress bars of one command, one per stage and domain."""

    def __init__(self, screen: Screen, bars: Progress, named: bool) -> None:
        self.screen, self.bars, self.named = screen, bars, named
        self.stage = ""
        self.tasks: dict[tuple[str, str], TaskID] = {}
        self.start, self.first = 0.0, 0

    def begin(self, stage: str, description: str) -> None:
        self.stage, self.tasks = stage, {}
        self.screen.info(f"{stage:9} {description}")

    def images(self, done: int, total: int) -> None:
        key = (self.stage, "")
        if key not in self.tasks:
            self.start, self.first = time.perf_counter(), done
        rate = (done - self.first) / max(time.perf_counter() - self.start, 1e-9)
        self._update(key, done, total, f"{rate:.0f} images/s" if done > self.first else "")

    def training(self, step: Step) -> None:
        key = (step.stage, step.domain)
        if key not in self.tasks:
            description = DESCRIPTIONS.get(step.stage, "")
            self.begin(step.stage, f"{step.domain}: {description}" if self.named else description)
        steps = step.steps or step.step
        notes = [] if step.loss is None else [f"loss {step.loss:.3f}"]
        notes += [] if step.accuracy is None else [f"validation {step.accuracy:.1f} %"]
        notes += [f"{step.images_per_second:.0f} images/s"] if step.images_per_second else []
        done, total = step.epoch * steps + step.step, step.epochs * steps
        self._update(key, done, total, ", ".join(notes))

    def _update(self, key: tuple[str, str], done: int, total: int, note: str) -> None:
        if key not in self.tasks:
            self.tasks[key] = self.bars.add_task(key[0], total=total, note="")
        self.bars.update(self.tasks[key], completed=done, total=total, note=note)


DESCRIPTIONS = {
    "collect": "n, mean and covariance of A's input, over the training images",
    "gradients": "gradients of the loss at A's output, over a few hundred images",
    "normalize": "compress A to C·M·W in closed form; validation images decide how far",
    "train": "train the adapters A, norms and head; the backbone stays frozen",
    "tune": "train M, norms and head to recover what the compression lost",
    "warm-up": "train only the new head first",
}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """Return a table with text aligned left and numbers aligned right."""
    result = Table(title=title or None, title_justify="left", header_style="bold", box=None)
    for i, column in enumerate(columns):
        number = any(not isinstance(row[i], str) for row in rows) or column[-1:] == "%"
        result.add_column(column, justify="right" if number and i else "left", no_wrap=True)
    for row in rows:
        result.add_row(*(_text(cell) for cell in row))
    return result


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return f"{cell:,}" if isinstance(cell, int) else _printable(cell).replace("[", r"\[")


def _printable(text: str) -> str:
    """Escape the bytes of file names that are not valid text."""
    return text.encode("utf-8", "backslashreplace").decode()
