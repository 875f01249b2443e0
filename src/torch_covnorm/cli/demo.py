"""`demo`: four real tasks on one real network, from an empty folder to a report."""

from __future__ import annotations

import json as json_
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

from ..data import sample
from ..data.decode import Decoded
from ..data.loader import Batches, as_input
from ..data.source import read_source
from ..ecology import Ecology
from ..ecology.add import add
from ..ecology.config import BATCH, MAX_DROP, METRIC, add_config
from ..ecology.images import decode_for, images_of
from ..ecology.join import METHOD as JOINT
from ..ecology.join import join
from ..ecology.manifest import MANIFEST
from ..ecology.prediction import preprocessing
from ..errors import CovNormError
from ..methods.adapt import adapt
from ..methods.result import Adapted
from ..records import write_file
from ..report.wording import size
from .options import Json, Quiet, Seed, Threads, set_threads
from .screen import Screen, table

FOLDER = Path(sample.__file__).with_name("samples")
PIXELS = 64
BUDGET = 0.008  # of the backbone's parameters: less than 1/8 of uncompressed adapters
TRAINING: dict[str, Any] = {"epochs": 6, "norms": "frozen"}
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
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build an ecology of four real tasks on EfficientNet-Lite0: add, join, switch, report.

    The images come with the package, the ImageNet weights with the extra `default`. It takes about
    ten minutes on two cores. If it is interrupted, run it again to resume.
    """
    screen, start = Screen(json, quiet), time.perf_counter()
    set_threads(threads)
    ecology = _open(folder, seed)
    backbone = ecology.backbone
    screen.info(
        f"{folder}/: EfficientNet-Lite0 with ImageNet weights, {backbone['parameters']:,} "
        f"parameters, {size(backbone['bytes'])}; it stays frozen"
    )
    for i, name in enumerate(sample.SAMPLES, 1):
        _add(screen, ecology, name, seed, i)
    screen.info("")
    smallest = _find_smallest(screen, ecology, seed)
    _join(screen, ecology, seed)
    screen.info("\nswitch: one batch with two images of each of the four tasks")
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
    screen.result(value, *_tables(value, precisions), *_next_steps(folder, value["report"]))
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


def _add(screen: Screen, ecology: Ecology, name: str, seed: int, number: int) -> None:
    if name in ecology.domains:
        screen.info(f"{number}/4 {name}: already added")
        return
    file = FOLDER / f"{name}.npz"
    source = read_source(file, seed=seed)
    parts = ", ".join(f"{len(items):,} {split}" for split, items in source.splits.items())
    screen.info(f"\n{number}/4 {name}: {len(source.classes)} classes; {parts}")
    options = {**TRAINING, "budget": int(BUDGET * ecology.backbone["parameters"])}
    with screen.reporting() as reporter:
        reporter.stage("decode", f"to {PIXELS} × {PIXELS} pixels, once; kept in the cache")
        data = decode_for(ecology, source, PIXELS, progress=reporter.images)
        config = add_config("covnorm", options, seed=seed)
        where = {"path": str(file), "seed": seed}
        add(ecology, name, data, config, source=where, reporter=reporter)


def _find_smallest(screen: Screen, ecology: Ecology, seed: int) -> dict[str, dict[str, Any]]:
    """Compress each trained A to the smallest file; keep the results for a second run."""
    file = ecology.folder / "smallest.json"
    results: dict[str, dict[str, Any]] = json_.loads(file.read_text()) if file.exists() else {}
    for name in sample.SAMPLES:
        if name not in results:
            screen.info(f"smallest file for {name}: at most {MAX_DROP} points below RA")
            results[name] = _smallest(screen, ecology, name, seed)
            write_file(file, json_.dumps(results, indent=1).encode())
    return results


def _smallest(screen: Screen, ecology: Ecology, name: str, seed: int) -> dict[str, Any]:
    net = ecology.network()
    ecology.load(net, name, trained=True)
    inputs, splits = preprocessing(net, name), images_of(ecology, name).splits

    def batches(split: str, size: int = 64, shuffle: bool = False) -> Batches:
        return Batches(splits[split].x, splits[split].y, inputs, size, shuffle)

    with screen.reporting() as reporter:
        done: Adapted = adapt(
            net,
            name,
            batches("train", BATCH, shuffle=True),
            batches("val"),
            add_config("covnorm", TRAINING, seed=seed).run,
            statistics=batches("train"),
            test=batches("test"),
            progress=reporter.training,
        )
    assert done.dtype is not None
    assert done.storage is not None
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
    options = {"variance": VARIANCE, **TRAINING}
    with screen.reporting(named=True) as reporter:
        config = add_config(JOINT, options, seed=seed)

        def images(name: str) -> Decoded:
            return images_of(ecology, name, progress=reporter.images)

        join(ecology, list(sample.SAMPLES), images, config, reporter=reporter)


def _switch(screen: Screen, ecology: Ecology) -> list[dict[str, Any]]:
    """Classify two images of every task in one batch, with one domain per sample."""
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


def _tables(value: dict[str, Any], precisions: list[str]) -> list[Table | str]:
    """Return what the demo prints of its results."""
    means = [
        (row["name"], row["accuracy"], row["adapter"], row["of_ra"], f"{row['of_network']:.2f}")
        + ((size(row["bytes"]), f"{row['of_bytes']:.2f}") if row["bytes"] else (None, None))
        for row in value["rows"]
    ]
    columns = ("mean of four", "accuracy %", "adapter", "% of RA", "% of net", "file", "% of net")
    accuracies = [(name, *task.values()) for name, task in value["tasks"].items()]
    answers = [tuple(answer.values()) for answer in value["switching"]]
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
    ]


def _next_steps(folder: Path, report: str | None) -> list[str]:
    command = "covnorm" if shutil.which("covnorm") else sys.argv[0]  # `make demo`: in .venv/bin
    return [
        "",
        "next steps:",
        *([f"  open {report}"] if report else []),
        f"  {command} list --ecology {folder}",
        f"  {command} show digits --ecology {folder}",
        f"  {command} add NAME IMAGES --ecology {folder}    IMAGES: one folder per class",
    ]
