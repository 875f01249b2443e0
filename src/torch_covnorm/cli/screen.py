"""What the command prints: results on stdout, messages and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Table

from ..training.progress import Progress as Step
from ..training.progress import Reporter

Cell = str | int | float | None
# Text is printed as it is: file names may contain [brackets] and :words: that rich would replace.
PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False}


class Screen:
    """The output of one command.

    as_json: print results as JSON. quiet: print no messages and no progress.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        # No table is cut, whatever the width of the terminal: a truncated number would be wrong.
        self.out = Console(file=sys.stdout, width=2**30, **PLAIN)
        self.err = Console(file=sys.stderr, **PLAIN)

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
            self.out.print(_printable(part) if isinstance(part, str) else part)

    def text(self, text: str) -> None:
        """Print text as it is, for other programs."""
        sys.stdout.write(_printable(text))

    def info(self, text: str) -> None:
        """Print a message about what is happening, unless quiet."""
        if not self.quiet:
            self.err.print(_printable(text))

    @contextlib.contextmanager
    def reporting(self, named: bool = False) -> Iterator[Reporter]:
        """Report progress: one line per stage, and on a terminal a bar with rate and time left.

        named: prefix each stage with its domain, for work on several domains.
        """
        bars = progress.Progress(
            progress.TextColumn("  {task.description:9}"),
            progress.BarColumn(24),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("{task.fields[note]}"),
            console=self.err,
            disable=self.quiet or not self.err.is_terminal,
        )
        stages = _Stages(self, bars, named)
        with bars:
            yield Reporter(stages.begin, stages.training, stages.images)


class _Stages:
    """The progress bars of one command, one per stage and domain."""

    def __init__(self, screen: Screen, bars: progress.Progress, named: bool) -> None:
        self.screen, self.bars, self.named = screen, bars, named
        self.stage, self.domain = "", ""
        self.task: progress.TaskID | None = None

    def begin(self, stage: str, description: str, domain: str = "") -> None:
        self.stage, self.domain, self.task = stage, domain, None
        self.screen.info(f"{stage:9} {description}")

    def images(self, done: int, total: int) -> None:
        speed = None if self.task is None else self.bars.tasks[self.task].speed
        self._update(done, total, f"{speed:.0f} images/s" if speed else "")

    def training(self, step: Step) -> None:
        if (step.stage, step.domain) != (self.stage, self.domain):
            prefix = f"{step.domain}: " if self.named else ""
            self.begin(step.stage, prefix + DESCRIPTIONS.get(step.stage, ""), step.domain)
        steps = step.steps or step.step
        loss = "" if step.loss is None else f"loss {step.loss:.3f}, "
        accuracy = "" if step.accuracy is None else f"validation {step.accuracy:.1f} %, "
        speed = f"{step.images_per_second:.0f} images/s" if step.images_per_second else ""
        note = f"{loss}{accuracy}{speed}".removesuffix(", ")
        self._update(step.epoch * steps + step.step, step.epochs * steps, note)

    def _update(self, done: int, total: int, note: str) -> None:
        if self.task is None:
            self.task = self.bars.add_task(self.stage, total=total, note="")
        self.bars.update(self.task, completed=done, total=total, note=note)


DESCRIPTIONS = {
    "collect": "n, mean and covariance of A's input, over the training images",
    "gradients": "gradients of the loss at A's output, over a few hundred images",
    "normalize": "compress A to C·M·W in closed form; validation images decide how far",
    "race": "try learning rates for a short while: the validation images show which are too high",
    "train": "train what the domain owns; the backbone stays frozen",
    "tune": "train M, norms and head to recover what the compression lost",
    "warm-up": "train only the new head first",
}


def print_error(message: str) -> int:
    """Print an error in one line on stderr; return its exit code."""
    print(f"covnorm: {' '.join(message.split())}", file=sys.stderr)
    return 2


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """Return a table with text aligned left and numbers aligned right."""
    result = Table(title=title or None, title_justify="left", header_style="bold", box=None)
    for i, column in enumerate(columns):
        number = any(not isinstance(row[i], str) for row in rows) or (i and column[-1:] == "%")
        result.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        result.add_row(*(_text(cell) for cell in row))
    return result


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return f"{cell:,}" if isinstance(cell, int) else _printable(cell)


def _printable(text: str) -> str:
    """Escape the bytes of file names that are not valid text."""
    return text.encode("utf-8", "backslashreplace").decode()
