"""The demo's own row: the smallest file within half a point, from the A's that are there."""

from __future__ import annotations

import json
from typing import Any

from ..data.loader import Batches
from ..ecology import Ecology
from ..ecology.config import MAX_DROP, METRIC
from ..ecology.images import images_of
from ..ecology.prediction import preprocessing
from ..methods.adapt import adapt
from ..methods.result import Adapted
from ..records import write_file
from .screen import Screen


def smallest(
    screen: Screen, ecology: Ecology, names: tuple[str, ...], seed: int, training: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """{task: accuracy, parameters, bytes, dtype}; kept, so that a second demo finds them."""
    file = ecology.folder / "smallest.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        if name in found:
            continue
        screen.say(f"smallest file for {name}: ranks and precision, at most {MAX_DROP} points less")
        found[name] = _one(screen, ecology, name, seed, training)
        write_file(file, json.dumps(found, indent=1).encode())
    return found


def _one(
    screen: Screen, ecology: Ecology, name: str, seed: int, training: dict[str, Any]
) -> dict[str, Any]:
    net = ecology.network()
    ecology.load(net, name, trained=True)
    how, data = preprocessing(net, name), images_of(ecology, name)

    def batches(part: str, shuffle: bool = False) -> Batches:
        images = data.splits[part]
        return Batches(images.x, images.y, how, 32 if shuffle else 64, shuffle)

    with screen.reporting() as reporter:
        done: Adapted = adapt(
            net,
            name,
            batches("train", shuffle=True),
            batches("val"),
            "covnorm",
            metric=METRIC,
            max_drop=MAX_DROP,
            dtype="smallest",
            statistics=batches("train"),
            test=batches("test"),
            progress=reporter.training,
            seed=seed,
            **training,
        )
    assert done.dtype is not None
    assert done.storage is not None
    return {
        "accuracy": done.tested["final"],
        "parameters": done.parameters["adapter"],
        "bytes": done.storage[done.dtype]["bytes"],
        "dtype": done.dtype,
    }
