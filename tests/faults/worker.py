"""A process that adapts a small network, reports where it is, and halts at a given place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import small_digits
import torch
import torch._dynamo  # the first optimiser imports it: here once for all processes
from torch.utils.data import DataLoader, TensorDataset

import torch_covnorm as cn

Place = tuple[Any, ...]  # (domain, stage, epoch, step), (domain, "moments", batch), ("write", n)
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"method": "ra", "training": "auto", "epochs": 24},  # long enough for a race
    "covnorm": {"method": "covnorm", "variance": 0.95, "norms": "own"},
    "lwf": {"method": "lwf", "warm_up": 1, "lr": 0.01, "head_lr": 0.02},
    "piggyback": {"method": "piggyback", "training": "piggyback", "lr": 0.01},
    "covnorm-joint": {"method": "covnorm-joint", "variance": 0.95},
    "published": {"method": "covnorm", "preset": "official-code", "training": None},
    "smallest": {"max_drop": 30.0, "dtype": "smallest", "epochs": 12, "lr": 0.05},
    "declined": {
        **{"variance": 0.95, "dtype": "int8", "epochs": 12, "lr": 0.05},
        "tuning": {"epochs": 1, "lr": 100.0, "head_lr": 100.0},
    },
}


class Loader:
    """Shuffled batches that report when moments are collected from them."""

    def __init__(self, name: str, labels: torch.Tensor, saw: Callable[[Place], None]) -> None:
        images, _ = small_digits.digits()
        self.batches = DataLoader(TensorDataset(images, labels), 16, shuffle=True)
        self.name, self.saw = name, saw
        self.net: cn.MultiDomainNetwork | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        assert self.net is not None
        for i, batch in enumerate(self.batches):
            self.saw((self.name, "training" if self.net.training else "moments", i))
            yield batch


def network() -> cn.MultiDomainNetwork:
    return cn.MultiDomainNetwork(small_digits.backbone(dropout=0.2))


def adapt(
    case: str,
    saw: Callable[[Place], None] = lambda _: None,
    net: cn.MultiDomainNetwork | None = None,
    **changes: Any,
) -> cn.MultiDomainNetwork:
    """Run the case, from the beginning or from its snapshot; `saw` is called at every place."""
    net = network() if net is None else net
    _, y = small_digits.digits()
    joint = case == "covnorm-joint"
    names = ["digits", "parity"] if joint else ["digits"]
    loaders = [Loader(n, t, saw) for n, t in zip(names, (y, y % 2), strict=False)]
    x, old = small_digits.digits(40, 100)
    val = [[(x, old)], [(x, old % 2)]]
    now = ""

    def saw_batch(place: Place) -> None:
        nonlocal now
        now = place[0]
        saw(place)

    for loader in loaders:
        loader.net, loader.saw = net, saw_batch
    cn.adapt(
        net,
        names if joint else names[0],
        loaders if joint else loaders[0],
        val if joint else val[0],
        augment=small_digits.noisy,
        progress=lambda p: saw((now, p.stage, p.epoch, p.step)),
        every=0,
        **{"epochs": 2, "classes": [10, 2] if joint else 10, "training": "default"}
        | SETTINGS[case]
        | changes,
    )
    return net


def save(net: cn.MultiDomainNetwork, out: Path) -> None:
    for name in net.domains:
        net.save_domain(name, out / name)
    for name in net.bases:
        net.save_basis(name, out / f"basis-{name}")


def run(pipe: Connection, case: str, out: Path, halt: Place | None, changes: dict) -> None:
    """Run the case. At `halt`, send the place and wait to be killed, for a minute at most."""
    torch.set_num_threads(1)
    pipe.send("begun")
    writes = 0

    def saw(place: Place) -> None:
        if place == halt:
            pipe.send(place)
            time.sleep(60)
            os._exit(3)

    def fsync(handle: int, right: Callable[[int], None] = os.fsync) -> None:
        nonlocal writes
        writes += 1
        saw(("write", writes))
        right(handle)

    os.fsync = fsync
    try:
        net = adapt(case, saw, **changes)
    except cn.CovNormError as error:
        pipe.send(str(error))
        os._exit(2)
    os.fsync = fsync.__defaults__[0]
    save(net, out)
    pipe.send("done")
