"""Run a cell: one method on one data set with so many training images and one backbone."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch_covnorm.errors import CovNormError

from ..fetch import cache
from .environment import python_with_peft

METHODS = ("covnorm", "probe", "finetune", "lora")
PROJECT = Path(__file__).parents[2]


def run(method: str, folder: Path, backbone: str) -> dict[str, Any]:
    """Return what a method achieves on the test images of a folder, and what it costs."""
    if method == "covnorm":
        return _ours(folder, backbone)
    python = python_with_peft() if method == "lora" else Path(sys.executable)
    module = "benchmarks.strangers.neighbour"
    found, cost = _process([str(python), "-m", module, method, str(folder), backbone])
    return _row(found, cost)


def _ours(folder: Path, backbone: str) -> dict[str, Any]:
    """Run `covnorm add` with no option, and `covnorm predict` on the test images."""
    covnorm = [sys.executable, "-m", "torch_covnorm"]
    ecology = cache() / "strangers" / f"ecology-{os.getpid()}"
    here = ["--ecology", str(ecology), "--json"]
    try:
        _process([*covnorm, "init", str(ecology), "--backbone", backbone, "--json"])
        added, cost = _process([*covnorm, "add", "task", str(folder), *here])
        tests = sorted(str(f) for f in (folder / "test").glob("*/*"))
        answers, _ = _process([*covnorm, "predict", "task", *tests, *here])
    finally:
        shutil.rmtree(ecology, ignore_errors=True)
    right = {a["file"]: a["label"] == Path(a["file"]).parent.name for a in answers}
    found = {
        "correct": "".join("01"[right[f]] for f in tests),
        "files": [str(Path(f).relative_to(folder)) for f in tests],
        "parameters": added["parameters"]["total"],
        "bytes": added["bytes"],
        "lines": 2,  # init and add
        "add": added,
    }
    return _row(found, cost)


def _row(found: dict[str, Any], cost: dict[str, float]) -> dict[str, Any]:
    """Order the answers by file, so that those of two methods can be compared."""
    pairs = sorted(zip(found.pop("files"), found.pop("correct"), strict=True))
    correct = "".join(c for _, c in pairs)
    accuracy = 100 * correct.count("1") / len(correct)
    return {"accuracy": accuracy, "n": len(correct), "correct": correct, **found, **cost}


def _process(command: list[str]) -> tuple[Any, dict[str, float]]:
    """Return what a command prints as JSON, and its seconds: of the clock and of the CPUs."""
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "src")])
    start, before = time.perf_counter(), _cpu_seconds()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-3:]
        raise CovNormError(f"{' '.join(command[:6])} … failed: {' / '.join(last)}")
    cost = {"seconds": time.perf_counter() - start, "cpu_seconds": _cpu_seconds() - before}
    printed = done.stdout.strip()
    value = json.loads(printed if printed.startswith(("{", "[")) else printed.splitlines()[-1])
    return value, {k: round(v, 1) for k, v in cost.items()}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
