"""`demo`: four real tasks on one real network, from an empty folder to a report."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

from ..data import sample
from ..data.loader import Batches, as_input
from ..data.source import read_source
from ..ecology import Ecology
from ..ecology.config import BATCH, MAX_DROP, METRIC, add_config
from ..ecology.images import images_of
from ..ecology.join import METHOD as JOINT
from ..ecology.join import join
from ..ecology.manifest import MANIFEST
from ..ecology.prediction import preprocessing
from ..errors import CovNormError
from ..methods.adapt import adapt
from ..records import write_file
from ..report.wording import size
from .add import add_source
from .options import Output, Seed, Threads, use_threads
from .screen import Screen, table

FOLDER = Path(sample.__file__).with_name("samples")
PIXELS = 64
BUDGET = 0.008  # of the backbone's parameters: less than 1/8 of uncompressed adapters
TRAINING: dict[str, Any] = {}  # the defaults
VARIANCE = 0.9  # of joint mode
SYSTEMS = {  # key of a task's accuracies: name of its row of means
    "bare": "bare features",
    "RA": "RA",
    "CovNorm": "CovNorm",
    "smallest": "smallest file",
    "joint": "joint CovNorm",
}


class Measured(NamedTuple):
    """One task in one system: test accuracy in percent, adapter parameters, bytes of its file."""

    accuracy: float
    parameters: int
    bytes: int | None


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="ECOLOGY", help="Folder to create, or to continue in.")
    ] = Path("covnorm-demo"),
    seed: Seed = 0,
    threads: Threads = None,
    *,
    common: Output,
) -> None:
    """Build an ecology of four real tasks on EfficientNet-Lite0: add, join, switch, report.

    The images come with the package, the ImageNet weights with the extra `default`. It takes about
    a quarter of an hour on two cores. If it is interrupted, run it again to resume.
    """
    screen, start = common.screen, time.perf_counter()
    use_threads(threads)
    ecology = _open(folder, seed)
    backbone = ecology.backbone
    screen.info(
        f"{folder}/: EfficientNet-Lite0 with ImageNet weights, {backbone['parameters']:,} "
        f"parameters, {size(backbone['bytes'])}; it stays frozen"
    )
    for i, name in enumerate(sample.SAMPLES, 1):
        if name in ecology.domains:
            screen.info(f"{i}/4 {name}: already added")
            continue
        screen.info(f"\n{i}/4 {name}")
        source = read_source(FOLDER / f"{name}.npz", seed=seed)
        options = {**TRAINING, "budget": int(BUDGET * backbone["parameters"])}
        config = add_config("covnorm", options, seed=seed)
        add_source(screen, ecology, name, source, config, {"size": PIXELS})
    screen.info("")
    smallest = _find_smallest(screen, ecology, seed)
    _join(screen, ecology, seed)
    switching = _switch(screen, ecology)
    tasks = {name: _measured(ecology, name, smallest[name]) for name in sample.SAMPLES}
    value = {
        "tasks": {name: {k: m.accuracy for k, m in task.items()} for name, task in tasks.items()},
        "rows": [_means(ecology, system, list(tasks.values())) for system in SYSTEMS],
        "switching": switching,
        "report": _report(screen, ecology),
        "shared": ecology.details(sample.SAMPLES[0])["results"]["parameters"]["shared"],
        "seconds": time.perf_counter() - start,
    }
    precisions = sorted({result["dtype"] for result in smallest.values()})
    screen.result(value, *_shown(folder, value, precisions))
    screen.info(f"{value['seconds'] / 60:.1f} minutes")


def _open(folder: Path, seed: int) -> Ecology:
    """Create the demo's ecology, or open it if it was made with the same backbone and seed."""
    if not (folder / MANIFEST).is_file():
        return Ecology.create(folder, "efficientnet-lite0")
    ecology = Ecology(folder)
    if ecology.backbone["name"] != "efficientnet-lite0":
        raise CovNormError(
            f"{folder}: this ecology has the backbone {ecology.backbone['name']}: choose another "
            "folder for the demo"
        )
    for name in set(sample.SAMPLES) & set(ecology.domains):
        used = ecology.details(name)["settings"].get("seed")
        if used != seed:
            raise CovNormError(
                f"{folder}: domain {name!r} was made with --seed {used}: choose another folder, or "
                "the same seed"
            )
    return ecology


def _find_smallest(screen: Screen, ecology: Ecology, seed: int) -> dict[str, dict[str, Any]]:
    """Compress each trained A to the smallest file; keep the results for a second run."""
    file = ecology.folder / "smallest.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for name in sample.SAMPLES:
        if name not in results:
            screen.info(f"smallest file for {name}: at most {MAX_DROP} points below RA")
            results[name] = _smallest(screen, ecology, name, seed)
            write_file(file, json.dumps(results, indent=1).encode())
    return results


def _smallest(screen: Screen, ecology: Ecology, name: str, seed: int) -> dict[str, Any]:
    net = ecology.network()
    ecology.load(net, name, trained=True)
    inputs, splits = preprocessing(net, name), images_of(ecology, name).splits

    def batches(split: str, size: int = 64, shuffle: bool = False) -> Batches:
        return Batches(splits[split].x, splits[split].y, inputs, size, shuffle)

    with screen.reporting() as reporter:
        done: Any = adapt(
            net,
            name,
            batches("train", BATCH, shuffle=True),
            batches("val"),
            add_config("covnorm", TRAINING, seed=seed).run,
            statistics=batches("train"),
            test=batches("test"),
            progress=reporter.training,
        )
    return {
        "accuracy": done.tested["final"],
        "parameters": done.parameters["adapter"],
        "bytes": done.storage[done.dtype]["bytes"],
        "dtype": done.dtype,
    }


def _join(screen: Screen, ecology: Ecology, seed: int) -> None:
    if all(ecology.entry(name).basis for name in sample.SAMPLES):
        return
    screen.info("\njoin: all four share one C and W; each keeps only its M, norms and head")
    config = add_config(JOINT, {"variance": VARIANCE, **TRAINING}, seed=seed)
    with screen.reporting(named=True) as reporter:
        images = partial(images_of, ecology, progress=reporter.images)
        join(ecology, sample.SAMPLES, images, config, reporter=reporter)


def _switch(screen: Screen, ecology: Ecology) -> list[dict[str, Any]]:
    """Classify two images of every task in one batch, with one domain per sample."""
    screen.info("\nswitch: one batch with two images of each of the four tasks")
    net, names, images, truths = ecology.network(), [], [], []
    for name in sample.SAMPLES:
        start = time.perf_counter()
        domain = ecology.load(net, name)
        screen.info(f"load {name}: {1000 * (time.perf_counter() - start):.0f} ms")
        part = images_of(ecology, name).splits["test"]
        names += [name] * 2
        images.append(part.x[:2])
        truths += [(domain.classes or ())[y] for y in part.y[:2].tolist()]
    x = as_input(torch.cat(images), preprocessing(net, names[0]))
    with torch.no_grad():
        logits = net.eval()(x, domain=names)
    answers = []
    for name, truth, row in zip(names, truths, logits, strict=True):
        sure, place = row.softmax(0).max(0)
        answer = (net.domain(name).classes or ())[int(place)]
        answers.append({"task": name, "truth": truth, "answer": answer, "sure": 100 * float(sure)})
    return answers


def _report(screen: Screen, ecology: Ecology) -> str | None:
    from ..report import facts_of, write_report

    file = ecology.folder / "report.html"
    try:
        write_report(facts_of(ecology), file)
    except CovNormError as error:  # the packages that draw it are an extra
        screen.info(f"no report: {error}")
        return None
    return str(file)


def _measured(ecology: Ecology, name: str, smallest: dict[str, Any]) -> dict[str, Measured]:
    """Return one task in every system."""
    details = ecology.details(name)
    added, joint = details["history"][0], details["results"]
    stages, adapter = added["stages"], joint["parameters"]["adapter"]
    return {
        "bare": Measured(stages["before"], 0, None),
        "RA": Measured(stages["adapted"], joint["denominators"]["ra"], joint["trained_bytes"]),
        "CovNorm": Measured(stages["final"], added["parameters"], added["bytes"]),
        "smallest": Measured(*(smallest[field] for field in Measured._fields)),
        "joint": Measured(joint["accuracy"]["final"], adapter, joint["bytes"]),
    }


def _means(ecology: Ecology, system: str, tasks: list[dict[str, Measured]]) -> dict[str, Any]:
    """Return a system's row of the demo's table: means over the tasks, and shares in percent."""
    network, ra = ecology.backbone, tasks[0]["RA"].parameters
    adapter = statistics.fmean(task[system].parameters for task in tasks)
    sizes = [size for task in tasks if (size := task[system].bytes) is not None]
    file = statistics.fmean(sizes) if sizes else None
    return {
        "name": SYSTEMS[system],
        "accuracy": statistics.fmean(task[system].accuracy for task in tasks),
        "adapter": round(adapter),
        "of_ra": 100 * adapter / ra,
        "of_network": 100 * adapter / network["parameters"],
        "bytes": file,
        "of_bytes": file and 100 * file / network["bytes"],
    }


def _shown(folder: Path, value: dict[str, Any], precisions: list[str]) -> list[Table | str]:
    """Return what the demo prints: its results, and what to do next."""
    means = [
        (row["name"], row["accuracy"], row["adapter"], row["of_ra"], f"{row['of_network']:.2f}")
        + ((size(row["bytes"]), f"{row['of_bytes']:.2f}") if row["bytes"] else (None, None))
        for row in value["rows"]
    ]
    columns = ("mean of four", "accuracy %", "adapter", "% of RA", "% of net", "file", "% of net")
    accuracies = [(name, *task.values()) for name, task in value["tasks"].items()]
    answers = [tuple(answer.values()) for answer in value["switching"]]
    command = "covnorm" if shutil.which("covnorm") else sys.argv[0]  # `make demo`: in .venv/bin
    return [
        table("", ("one batch", "truth", "answer", "probability %"), answers),
        "",
        table("", ("test accuracy %", *SYSTEMS), accuracies),
        "",
        table("", columns, means),
        "adapter: number of parameters, counted as in the paper; the four joint domains share "
        f"{value['shared']:,} more",
        "file: with norms, head and record, in float16 except for the smallest file",
        f"smallest file: at most {MAX_DROP} points of validation accuracy below RA (ranks by the "
        f"{METRIC} metric, stored as {', '.join(precisions)}); the default of covnorm add",
        "",
        "next steps:",
        *([f"  open {value['report']}"] if value["report"] else []),
        f"  {command} list --ecology {folder}",
        f"  {command} show digits --ecology {folder}",
        f"  {command} add NAME IMAGES --ecology {folder}    IMAGES: one folder per class",
    ]
