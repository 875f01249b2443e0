"""A small ecology with a network that learns 8 px digits in an instant, and tools to inspect it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from zoo import shake_

import torch_covnorm as cn
from torch_covnorm import records
from torch_covnorm.data.decode import Decoded, Images
from torch_covnorm.ecology import Details, Ecology
from torch_covnorm.ecology.add import add
from torch_covnorm.ecology.config import AddConfig, add_config
from torch_covnorm.ecology.join import METHOD, join
from torch_covnorm.ecology.manifest import FORMAT, MANIFEST, Manifest
from torch_covnorm.methods.recipes import METHODS
from torch_covnorm.network.sites import NORMS
from torch_covnorm.training.progress import Reporter

CLASSES = tuple("0123456789")
PARTS = {"train": 60, "val": 20, "test": 40}
# Nothing is chosen from the data, so one epoch is one epoch, and no domain becomes a linear head.
FIXED = {
    name: getattr(cn.Training(), name)
    for name in ("lr", "norm_statistics", "head", "augment", "class_weights", "keep", "recover")
}


def backbone(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def decoded(*splits: str, parity: bool = False, start: int = 0) -> Decoded:
    """Return digits, or whether they are odd, as `decode` does."""
    data, parts, at = load_digits(), {}, start
    for split in splits or PARTS:
        n = PARTS[split]
        x = torch.tensor(data.images[at : at + n] * 15).to(torch.uint8)[:, None]
        y = torch.tensor(data.target[at : at + n]).long()
        files = tuple(f"{i}.png" for i in range(at, at + n))
        parts[split] = Images(x.expand(-1, 3, -1, -1).contiguous(), y % 2 if parity else y, files)
        at += n
    digest = hashlib.sha256(f"{sorted(parts)} {parity} {start}".encode()).hexdigest()
    classes = ("even", "odd") if parity else CLASSES
    return Decoded(parts, classes, 8, "squash", (), (), digest, ())


def config(
    method: str = "covnorm", dtype: str = "float16", seed: int = 0, **options: Any
) -> AddConfig:
    """Return settings for one epoch of any method, with fixed settings of training."""
    ranks = {"variance": 0.9} if method in ("covnorm", METHOD) else {}
    fixed = {**FIXED, **METHODS[method].training} if method in METHODS else FIXED
    options = {"epochs": 1, **fixed, **ranks, **options}
    return add_config(method, options, batch=20, dtype=dtype, seed=seed)


def added(ecology: Ecology, name: str, method: str = "covnorm", **changes: Any) -> dict[str, Any]:
    """Train and add a domain; return its details."""
    data = decoded(parity=name == "parity")
    return add(ecology, name, data, config(method, **changes), backbone=backbone())


def joined(ecology: Ecology, *names: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Join domains in one basis; return their details."""
    return join(
        ecology,
        names,
        lambda name: decoded(parity=name == "parity"),
        config(METHOD, **changes),
        backbone=backbone(),
    )


def everything(folder: Path) -> Ecology:
    """Create two joint domains, one that shares nothing, and one without A's or moments."""
    ecology = Ecology.create(folder, backbone())
    added(ecology, "digits")
    added(ecology, "parity")
    joined(ecology, "digits", "parity")
    added(ecology, "alone", seed=1, norms="sites")
    added(ecology, "norms", "bn")
    return ecology


# ── without training ──────────────────────────────────────────────────────────────────────────


def facts(accuracy: float = 50.0, **more: Any) -> dict[str, Any]:
    return {
        "method": "ra",
        "settings": {},
        "source": {},
        "results": {"accuracy": {"final": accuracy}},
        "history": [],
        **more,
    }


def network(*names: str, seed: int = 0) -> cn.MultiDomainNetwork:
    """Return a network with randomly changed domains of these names, of all kinds of norms."""
    net = cn.MultiDomainNetwork(backbone()).eval()
    for name in names:
        drawn = int(hashlib.sha256(f"{name} {seed}".encode()).hexdigest()[:8], 16)
        torch.manual_seed(drawn)
        net.add_domain(name, classes=3, norms=NORMS[drawn % len(NORMS)])
        shake_(net.domain(name))
    return net


def put(ecology: Ecology, *names: str, seed: int = 0, replace: bool = False, **kept: Any) -> None:
    net = network(*names, seed=seed)
    ecology.put(net, {n: Details(facts(), **kept) for n in names}, replace=replace)


def share(ecology: Ecology, *names: str, seed: int = 0, replace: bool = False) -> None:
    """Put domains that share the basis "joint". Another seed gives another basis."""
    net = network(*names, seed=seed)
    torch.manual_seed(seed)
    x = torch.randn(8, 3, 8, 8)
    cn.join_(net, list(names), {name: cn.collect(net, name, [x]) for name in names}, 0.9)
    ecology.put(net, {name: Details(facts()) for name in names}, replace=replace)


# ── what is there ─────────────────────────────────────────────────────────────────────────────


def answers(ecology: Ecology, name: str, trained: bool = False) -> bytes:
    """Return the logits of a stored domain, to the bit."""
    net = ecology.network(backbone())
    ecology.load(net, name, trained)
    x = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8).sin()
    with torch.inference_mode():
        return net.eval()(x, domain=name).numpy().tobytes()


def read(ecology: Ecology, name: str) -> tuple[Any, ...]:
    """Read every part of a domain."""
    moments = ecology.moments(name)
    trained = "trained.record" in ecology.entry(name).blobs
    return (
        ecology.details(name),
        ecology.record(name),
        ecology.examples(name),
        {site: (m.n, m.mean.tolist(), m.covariance.tolist()) for site, m in moments.items()},
        answers(ecology, name),
        answers(ecology, name, trained=True) if trained else None,
    )


def blobs_of(ecology: Ecology, name: str) -> set[str]:
    """Return the blobs that a domain needs, including its basis."""
    entry = ecology.entry(name)
    shared = () if entry.basis is None else ecology.bases[entry.basis].values()
    return {*entry.blobs.values(), *shared}


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the manifest and of all blobs."""
    found = [folder / MANIFEST, *(folder / "blobs").glob("*")]
    return {str(f.relative_to(folder)): f.read_bytes() for f in found}


def assert_tidy(folder: Path) -> None:
    """Check that the manifest names every blob, and no others."""
    named = Manifest.read(folder / MANIFEST).references()
    assert {f.name for f in (folder / "blobs").iterdir()} == named


# ── forging ───────────────────────────────────────────────────────────────────────────────────


def content(record: dict[str, Any]) -> dict[str, Any]:
    seals = ("format", "version", "versions", "checksum")
    return {k: v for k, v in record.items() if k not in seals}


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and seal it again, so that every checksum fits."""
    manifest = content(json.loads((folder / MANIFEST).read_bytes()))
    change(manifest)
    (folder / MANIFEST).write_bytes(records.sealed(FORMAT, manifest, indent=None))


def forge_blob(
    folder: Path, where: tuple[str, ...], change: Callable[[dict[str, Any]], object]
) -> None:
    """Change a record that the manifest names, such as ("bases", "joint", "record")."""

    def replaced(manifest: dict[str, Any]) -> None:
        *path, last = where
        place = manifest
        for key in path:
            place = place[key]
        record = json.loads((folder / "blobs" / place[last]).read_bytes())
        kind, record = record["format"], content(record)
        change(record)
        data = records.sealed(kind, record)
        place[last] = f"{hashlib.sha256(data).hexdigest()}.json"
        (folder / "blobs" / place[last]).write_bytes(data)

    forge(folder, replaced)


# ── the system ────────────────────────────────────────────────────────────────────────────────

_watchers: list[list[str]] = []


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _watchers and event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        for seen in _watchers:
            seen.append(os.fsdecode(args[0]))


@contextlib.contextmanager
def opened() -> Iterator[list[str]]:
    """Collect the files that Python opens inside, in order."""
    if not hasattr(_hear, "on"):  # a hook stays for good, so there is one
        sys.addaudithook(_hear)
        _hear.on = True  # type: ignore[attr-defined]
    seen: list[str] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


@contextlib.contextmanager
def mounted(*command: str) -> Iterator[bool]:
    """Mount something for a while; yield False if this process is not allowed to."""
    done = subprocess.run(["mount", *command], capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", command[-1]], check=True)


class Steps(list):
    """The stage of every training step; `stop` is the stage at which to interrupt."""

    def __init__(self, stop=None):
        super().__init__()
        self.stop = stop

    def reporting(self):
        return Reporter(training=self._step)

    def _step(self, progress):
        self.append(progress.stage)
        if progress.stage == self.stop:
            raise KeyboardInterrupt
