"""Result files that survive an interrupted run: existing results are not measured again."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_covnorm.version import __version__

RESULTS = Path(__file__).parent / "results"


class Ledger:
    """A JSON file with one entry per measurement."""

    def __init__(self, name: str, fresh: bool = False) -> None:
        self.file = RESULTS / f"{name}.json"
        self.entries: dict[str, Any] = {}
        if self.file.exists() and not fresh:
            self.entries = json.loads(self.file.read_text())

    def run(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the entry with this name; measure it if it is missing."""
        if name not in self.entries:
            print(f"… {name}", flush=True)
            start = time.perf_counter()
            entry = measure()
            entry["seconds"] = round(time.perf_counter() - start, 1)
            entry["machine"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
            entry["torch"] = torch.__version__
            self.entries[name] = entry
            self.file.parent.mkdir(exist_ok=True)
            temporary = self.file.with_suffix(".part")
            temporary.write_text(json.dumps(self.entries, indent=1) + "\n")
            temporary.replace(self.file)
        return self.entries[name]


def seconds(*runs: Callable[[], Any], rounds: int = 15, warm: int = 2) -> list[float]:
    """Return the lower quartile of each run's times; runs alternate to share conditions."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(warm + rounds):
        for run, kept in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if round_ >= warm:
                kept.append(time.perf_counter() - start)
    return [sorted(kept)[len(kept) // 4] for kept in times]


def cpu() -> str:
    """Return the CPU instructions that torch uses; a seed repeats only with the same ones."""
    return str(torch.backends.cpu.get_cpu_capability())


class Lines:
    """A file of JSON lines, one per result."""

    def __init__(self, name: str, fresh: bool = False) -> None:
        self.file = RESULTS / f"{name}.jsonl"
        self.rows: list[dict[str, Any]] = []
        if fresh:
            self.file.unlink(missing_ok=True)
        if self.file.exists():
            self.rows = [json.loads(line) for line in self.file.read_text().splitlines()]

    def find(self, **keys: Any) -> dict[str, Any] | None:
        """Return the first row with these values, or None."""
        return next(iter(self.all(**keys)), None)

    def all(self, **keys: Any) -> list[dict[str, Any]]:
        """Return every row with these values; a missing key counts as None."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in keys.items())]

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append a row, with the machine and the versions that made it."""
        row = {
            **row,
            "machine": platform.machine(),
            "cpu": cpu(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_covnorm": __version__,
        }
        self.rows.append(row)
        self.file.parent.mkdir(exist_ok=True)
        with self.file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        return row
