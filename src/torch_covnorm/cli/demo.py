"""`demo`: four real tasks on one real network, from nothing to a report, by the same steps."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..data import sample
from ..data.loader import as_input
from ..data.source import read_source
from ..ecology import Ecology
from ..ecology.add import add
from ..ecology.config import MAX_DROP, METRIC, add_config
from ..ecology.images import decode_for, images_of
from ..ecology.join import METHOD as JOINT
from ..ecology.join import join
from ..ecology.manifest import MANIFEST
from ..ecology.prediction import preprocessing
from ..errors import CovNormError
from .demo_smallest import smallest
from .options import Json, Quiet, Seed, Threads, set_threads
from .screen import Screen, size, table

FOLDER = Path(sample.__file__).with_name("samples")
PIXELS = 64
BUDGET = 0.008  # of the backbone's parameters: less than 1/8 of uncompressed adapters
TRAINING: dict[str, Any] = {"epochs": 6, "norms": "frozen"}
VARIANCE = 0.9  # of joint mode

Results = dict[str, dict[str, Any]]  # by task


def demo(
    folder: Annotated[Path, typer.Argument(metavar="ECOLOGY")] = Path("covnorm-demo"),
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build an ecology of four real tasks on EfficientNet-Lite0: add, join, switch, report.

    The images come with the package, the ImageNet weights with the extra `default`. Some ten
    minutes on two cores; interrupted, it goes on.
    """
    screen = Screen(json, quiet)
    set_threads(threads)
    start = time.perf_counter()
    there = (folder / MANIFEST).is_file()
    ecology = Ecology(folder) if there else Ecology.create(folder, "efficientnet-lite0")
    backbone = ecology.backbone
    if backbone["name"] != "efficientnet-lite0":
        raise CovNormError(f"{folder}: an ecology of {backbone['name']}: give another folder")
    for name in [n for n in ecology.domains if n in sample.SAMPLES]:
        made = ecology.details(name)["settings"].get("seed")
        if made != seed:
            raise CovNormError(
                f"{folder}: {name!r} was made with --seed {made}: give another folder"
            )
    screen.say(
        f"{folder}/: EfficientNet-Lite0 with its ImageNet weights, {backbone['parameters']:,} "
        f"parameters, {size(backbone['bytes'])}; it stays frozen from here on"
    )
    for i, name in enumerate(sample.SAMPLES, 1):
        _add(screen, ecology, name, seed, i)
    screen.say("")
    small = smallest(screen, ecology, sample.SAMPLES, seed, TRAINING)
    _join(screen, ecology, seed)
    details = {name: ecology.details(name) for name in sample.SAMPLES}
    added = {name: known["history"][0] for name, known in details.items()}
    joined = {name: known["results"] for name, known in details.items()}
    screen.say("\nswitch: all four at once, two images each, in one batch")
    switched = _switch(screen, ecology)
    report = _report(screen, ecology)
    tasks = {name: _accuracies(added[name], small[name], joined[name]) for name in sample.SAMPLES}
    rows, seconds = _rows(ecology, added, small, joined), time.perf_counter() - start
    value = {"tasks": tasks, "rows": rows, "switching": switched, "report": report}
    shared = next(iter(joined.values()))["parameters"]["shared"]
    shown = _shown(tasks, rows, switched, shared, _precisions(small))
    screen.result({**value, "shared": shared, "seconds": seconds}, *shown, *_next(folder, report))
    screen.say(f"{seconds / 60:.1f} minutes")


def _accuracies(added: Any, small: Any, joined: Any) -> dict[str, float]:
    """Of one task on its test images, in percent."""
    stages = {"bare": "before", "RA": "adapted", "CovNorm": "final"}
    alone = {name: added["stages"][stage] for name, stage in stages.items()}
    return {**alone, "smallest": small["accuracy"], "joint": joined["accuracy"]["final"]}


def _shown(
    tasks: dict[str, dict[str, float]],
    rows: list[dict[str, Any]],
    switched: list[dict[str, Any]],
    shared: int,
    precisions: str,
) -> list[Any]:
    by_task: list[list[Any]] = [[name, *found.values()] for name, found in tasks.items()]
    means = [
        (
            row["name"],
            row["accuracy"],
            row["adapter"],
            f"{row['of_ra']:.1f}",
            f"{row['of_network']:.2f}",
            "–" if row["bytes"] is None else size(row["bytes"]),
            "–" if row["bytes"] is None else f"{row['of_bytes']:.2f}",
        )
        for row in rows
    ]
    answers = [tuple(s.values()) for s in switched]
    heads = (
        "mean of four",
        "accuracy %",
        "adapter",
        "of RA's %",
        "of the net %",
        "file",
        "of its %",
    )
    return [
        table("", ("one batch", "truth", "answer", "sure %"), answers),
        "",
        table("", ("test accuracy %", *next(iter(tasks.values()))), by_task),
        "",
        table("", heads, means),
        f"adapter: parameters as the paper counts; joint: {shared:,} more are shared by the four",
        f"smallest: ranks in the metric of the {METRIC}, precision ({precisions}), for at "
        f"most {MAX_DROP} points of validation accuracy less than RA: add chooses so by itself",
        "file: float16 elsewhere; norms, head and record too; of its %: of the backbone's bytes",
    ]


def _precisions(small: Results) -> str:
    return ", ".join(sorted({found["dtype"] for found in small.values()}))


def _next(folder: Path, report: str | None) -> list[str]:
    command = "covnorm" if shutil.which("covnorm") else sys.argv[0]  # `make demo`: in .venv/bin
    return [
        "",
        "type next:",
        *([f"  open {report}"] if report else []),
        f"  {command} list --ecology {folder}",
        f"  {command} show digits --ecology {folder}",
        f"  {command} add NAME IMAGES --ecology {folder}    IMAGES: one folder a class",
    ]


def _add(screen: Screen, ecology: Ecology, name: str, seed: int, place: int) -> None:
    if name in ecology.domains:
        screen.say(f"{place}/4 {name}: is there already")
        return
    file = FOLDER / f"{name}.npz"
    source = read_source(file, seed=seed)
    parts = ", ".join(f"{len(items):,} {split}" for split, items in source.splits.items())
    screen.say(f"\n{place}/4 {name}: {len(source.classes)} classes; {parts}")
    options = {**TRAINING, "budget": int(BUDGET * ecology.backbone["parameters"])}
    with screen.reporting() as reporter:
        reporter.stage("decode", f"to {PIXELS} × {PIXELS} pixels, once; kept in the cache")
        data = decode_for(ecology, source, PIXELS, progress=reporter.images)
        config = add_config("covnorm", options, seed=seed)
        where = {"path": str(file), "seed": seed}
        add(ecology, name, data, config, source=where, reporter=reporter)


def _join(screen: Screen, ecology: Ecology, seed: int) -> None:
    if all(ecology.entry(name).basis for name in sample.SAMPLES):
        return
    screen.say("\njoin: one C and W for all four; each keeps only its M, norms and head")
    options = {"variance": VARIANCE, **TRAINING}
    with screen.reporting(named=True) as reporter:
        config = add_config(JOINT, options, seed=seed)
        names = [n for n in sample.SAMPLES if n in ecology.domains]
        join(
            ecology,
            names,
            lambda n: images_of(ecology, n, progress=reporter.images),
            config,
            reporter=reporter,
        )


def _switch(screen: Screen, ecology: Ecology) -> list[dict[str, Any]]:
    """Two images of every task in one batch, a task a sample; and what changing the task costs."""
    net, names, images, truths = ecology.network(), [], [], []
    for name in sample.SAMPLES:
        start = time.perf_counter()
        domain = ecology.load(net, name)
        screen.say(f"load {name}: {1000 * (time.perf_counter() - start):.0f} ms")
        part = images_of(ecology, name).splits["test"]
        names += [name] * 2
        images.append(part.x[:2])
        truths += [(domain.classes or ())[y] for y in part.y[:2].tolist()]
    x = as_input(torch.cat(images), preprocessing(net, names[0]))
    with torch.no_grad():
        logits = net.eval()(x, domain=names)
    found = []
    for name, truth, row in zip(names, truths, logits, strict=True):
        sure, place = row.softmax(0).max(0)
        answer = (net.domain(name).classes or ())[int(place)]
        found.append({"task": name, "truth": truth, "answer": answer, "sure": 100 * float(sure)})
    return found


def _report(screen: Screen, ecology: Ecology) -> str | None:
    from ..report import facts_of, write_report

    file = ecology.folder / "report.html"
    try:
        write_report(facts_of(ecology), file)
    except CovNormError as error:  # its packages are an extra
        screen.say(f"no report: {error}")
        return None
    return str(file)


def _rows(
    ecology: Ecology, added: Results, small: Results, joined: Results
) -> list[dict[str, Any]]:
    """The table of the demo: means over the tasks."""
    network, size_ = ecology.backbone["parameters"], ecology.backbone["bytes"]
    ra = next(iter(joined.values()))["denominators"]["ra"]

    def mean(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    def row(name: str, accuracy: float, adapter: float, file: float | None) -> dict[str, Any]:
        said = {"name": name, "accuracy": accuracy, "adapter": round(adapter)}
        shares = {"of_ra": 100 * adapter / ra, "of_network": 100 * adapter / network}
        stored = {"bytes": file, "of_bytes": None if file is None else 100 * file / size_}
        return {**said, **shares, **stored}

    a, j = added.values(), joined.values()
    return [
        row("bare features", mean(r["stages"]["before"] for r in a), 0, None),
        row(
            "RA",
            mean(r["stages"]["adapted"] for r in a),
            ra,
            mean(r["trained_bytes"] for r in j),
        ),
        row(
            "CovNorm",
            mean(r["stages"]["final"] for r in a),
            mean(r["parameters"] for r in a),
            mean(r["bytes"] for r in a),
        ),
        row(
            "smallest file",
            *(mean(r[k] for r in small.values()) for k in ("accuracy", "parameters", "bytes")),
        ),
        row(
            "joint CovNorm",
            mean(r["accuracy"]["final"] for r in j),
            mean(r["parameters"]["adapter"] for r in j),
            mean(r["bytes"] for r in j),
        ),
    ]
