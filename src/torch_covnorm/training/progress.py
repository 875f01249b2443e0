"""How long work tells where it is: a function that is called at every step, or a bar."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """One step of a stage of a domain.

    `accuracy`, in percent, is of the validation after the last epoch; what does not train has no
    `loss`.
    """

    stage: str
    epoch: int
    epochs: int
    step: int
    steps: int | None
    loss: float | None
    accuracy: float | None
    images_per_second: float
    domain: str = ""


Report = Callable[[Progress], None]


def _silent(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Reporter:
    """Where work of several stages tells what it does.

    stage: called with a stage's name and what it is for. training: with every step. images: with
    (images so far, of how many), where a stage only reads them.
    """

    stage: Callable[[str, str], None] = _silent
    training: Report = _silent
    images: Callable[[int, int], None] = _silent


@dataclass(frozen=True)
class Watched:
    """The batches of a loader; `tell` is called behind each with its number and itself."""

    batches: Iterable[Any]
    tell: Callable[[int, Any], None]

    def __iter__(self) -> Iterator[Any]:
        for step, batch in enumerate(self.batches, 1):
            yield batch
            self.tell(step, batch)

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)


@contextlib.contextmanager
def showing(progress: bool | Report | None) -> Iterator[Report]:
    """Where to report to: a function; True, a bar; None, a bar on a terminal; False, nowhere."""
    if callable(progress):
        yield progress
        return
    if progress is None:
        progress = sys.stderr.isatty()
    if not progress:
        yield lambda _: None
        return
    with _bar() as report:
        yield report


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=1.0, note="")

        def report(p: Progress) -> None:
            done = p.epoch + (p.step / p.steps if p.steps else 0.0)
            loss = "" if p.loss is None else f"loss {p.loss:.3f}, "
            accuracy = "" if p.accuracy is None else f"validation {p.accuracy:.1f} %, "
            bars.update(
                task,
                description=f"{p.stage}, epoch {min(p.epoch + 1, p.epochs)}/{p.epochs}",
                completed=done,
                total=p.epochs,
                note=f"{loss}{accuracy}{p.images_per_second:.0f} images/s",
            )

        yield report
