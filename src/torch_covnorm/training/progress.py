"""Progress reporting for long-running work: a callback at every step, or a progress bar."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """One step of one stage for one domain.

    `accuracy` is the validation accuracy in percent after the last epoch. `loss` is None in
    stages that do not train.
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
    """The callbacks of work with several stages.

    stage: called with the name of each new stage and what it is for.
    training: called with every step.
    images: called with (images done, total) in stages that only read images.
    """

    stage: Callable[[str, str], None] = _silent
    training: Report = _silent
    images: Callable[[int, int], None] = _silent


@dataclass(frozen=True)
class WatchedLoader:
    """A loader that calls ``after_batch(step, batch)`` after each batch; steps count from 1."""

    batches: Iterable[Any]
    after_batch: Callable[[int, Any], None]

    def __iter__(self) -> Iterator[Any]:
        for step, batch in enumerate(self.batches, 1):
            yield batch
            self.after_batch(step, batch)

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)


@contextlib.contextmanager
def reporting(progress: bool | Report | None) -> Iterator[Report]:
    """Yield the function to report to.

    `progress` is that function, True for a bar, False for no report, or None for a bar if stderr
    is a terminal.
    """
    if callable(progress):
        yield progress
    elif progress or (progress is None and sys.stderr.isatty()):
        with _bar() as report:
            yield report
    else:
        yield _silent


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TextColumn

    columns = (*Bars.get_default_columns(), TextColumn("{task.fields[note]}"))
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=1.0, note="")

        def report(p: Progress) -> None:
            loss = "" if p.loss is None else f"loss {p.loss:.3f}, "
            accuracy = "" if p.accuracy is None else f"validation {p.accuracy:.1f} %, "
            bars.update(
                task,
                description=f"{p.stage}, epoch {min(p.epoch + 1, p.epochs)}/{p.epochs}",
                completed=p.epoch + (p.step / p.steps if p.steps else 0.0),
                total=p.epochs,
                note=f"{loss}{accuracy}{p.images_per_second:.0f} images/s",
            )

        yield report
