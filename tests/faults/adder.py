"""Tasks of a second process that writes to a small ecology: counted, killed or broken."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import small_ecology as small
import torch
import torch._dynamo  # the first optimiser imports it: here once for all processes
from child import Child

import torch_covnorm as cn
from torch_covnorm.ecology import Ecology, manifest, store
from torch_covnorm.ecology.add import add
from torch_covnorm.ecology.blobs import Blobs
from torch_covnorm.training.progress import Reporter

Event = tuple[str, str]  # ("rename", file), ("fsync", ""), ("unlink", ""), ("step", stage), …
EPOCHS = 2


def config(**changes: Any) -> Any:
    return small.config(epochs=EPOCHS, **changes)


def data() -> Any:
    return small.decoded("train", "test")


def add_digits(folder: Path, reporter: Reporter, name: str = "digits", **changes: Any) -> None:
    replace, fresh = (changes.pop(word, False) for word in ("replace", "fresh"))
    add(
        Ecology(folder),
        name,
        data(),
        config(**changes),
        backbone=small.backbone(),
        replace=replace,
        fresh=fresh,
        reporter=reporter,
    )


class Watch:
    """Record every event in this process; at event number `kill`, end it by kill −9."""

    def __init__(self, kill: int | None) -> None:
        self.kill, self.events = kill, []

    def saw(self, kind: str, what: str = "") -> None:
        if len(self.events) == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self.events.append((kind, what))

    def reporting(self) -> Reporter:
        return Reporter(
            lambda stage, _: self.saw("stage", stage), lambda p: self.saw("step", p.stage)
        )

    def install(self) -> None:
        def watched(kind: str, right: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.saw(kind, Path(os.fsdecode(args[1])).name if kind == "rename" else "")
                return right(*args, **kwargs)

            return call

        os.fsync = watched("fsync", os.fsync)
        os.replace = watched("rename", os.replace)
        os.unlink = watched("unlink", os.unlink)
        os.rmdir = watched("rmdir", os.rmdir)


# ── tasks ───────────────────────────────────────────────────────────────────────


def adding(pipe: Connection, folder: Path, kill: int | None, **changes: Any) -> Any:
    watch = Watch(kill)
    watch.install()
    add_digits(folder, watch.reporting(), **changes)
    return watch.events


def putting(pipe: Connection, folder: Path, names: list[str], rounds: int) -> Any:
    """Put, replace and remove; the last of each stays in the store."""
    ecology = Ecology(folder)
    for i in range(rounds):
        for name in names:
            small.put(ecology, name, seed=i, replace=True)
            small.put(ecology, f"{name}-short")
            ecology.remove([f"{name}-short"])
    return len(ecology.domains)


def rolling(pipe: Connection, folder: Path, names: list[str], kill: int | None) -> Any:
    """Roll back, and end at event number `kill`."""
    watch = Watch(kill)
    watch.install()
    Ecology(folder).rollback(names)
    return watch.events


def rolling_often(pipe: Connection, folder: Path, name: str, rounds: int) -> Any:
    """Roll a domain back and forth."""
    ecology = Ecology(folder)
    for _ in range(rounds):
        ecology.rollback([name])
    return rounds


def replacing(pipe: Connection, folder: Path, names: list[str]) -> Any:
    """Replace domains again and again, until the parent sends something."""
    ecology, i = Ecology(folder), 0
    while not pipe.poll():
        i += 1
        small.put(ecology, *names, seed=i, replace=True)
    return i


def limited(pipe: Connection, folder: Path, size: int) -> Any:
    """Limit the size of files, as if the disk were full for large ones."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    add_digits(folder, Reporter())


# ── broken on purpose, to see the tests fail ──────────────────────────────────────────────────


def without_lock() -> None:
    """Take no lock, and leave enough time between reading and writing the manifest to matter."""
    right = manifest.write_file

    def slow(file: Path, content: bytes) -> None:
        time.sleep(0.02)
        right(file, content)

    store.locked = lambda *_: contextlib.nullcontext()
    manifest.write_file = slow


def manifest_first() -> None:
    """Write blobs after the manifest that names them."""
    right, write = Blobs.write, manifest.write_file
    waiting: list[tuple[Blobs, bytes, str]] = []

    def later(blobs: Blobs, content: bytes, ending: str) -> str:
        import hashlib

        waiting.append((blobs, content, ending))
        return f"{hashlib.sha256(content).hexdigest()}.{ending}"

    def write_file(file: Path, content: bytes) -> None:
        write(file, content)
        for item in waiting:
            right(*item)

    Blobs.write, Blobs.size, manifest.write_file = later, lambda *_: 1, write_file


def run(pipe: Connection, task: str, broken: str | None, args: tuple, changes: dict) -> None:
    """Run a task and send ("done", result), ("error", message) or ("raised", exception)."""
    torch.set_num_threads(1)
    if broken is not None:
        globals()[broken]()
    pipe.send("begun")
    try:
        result = globals()[task](pipe, *args, **changes)
    except cn.CovNormError as error:
        pipe.send(("error", str(error)))
    except BaseException as error:
        pipe.send(("raised", repr(error)))
    else:
        pipe.send(("done", result))


def start(task: str, *args: Any, broken: str | None = None, **changes: Any) -> Child:
    """Start a process that runs one of the tasks above."""
    return Child(run, task, broken, args, changes)
