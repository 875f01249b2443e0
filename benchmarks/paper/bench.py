"""What all tables share: backbones, domains, trained adapters, and one cell of a table.

A cell is a method on a domain with a seed: one `cn.adapt` call and one JSON line. Existing cells
are not run again.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_covnorm as cn
from torch_covnorm.backbones import preprocessing_of
from torch_covnorm.data import prepare
from torch_covnorm.data.loader import Batches
from torch_covnorm.records import digest
from torch_covnorm.stats.ranks import rank_of

from .. import domains, originals
from ..fetch import cache
from ..ledger import Lines
from ..originals import archive_in
from ..vgg16_weights import vgg16_file
from .keys import cell as cell_key
from .pretraining import origin, resnet26_file, weights
from .settings import BATCH, EPOCHS, PIXELS, TUNING, WHOLE, kind, published, rate


class Bench:
    """One backbone with the domains of the benchmark, and the file for the results."""

    def __init__(self, backbone: str, lines: Lines, folder: Path | None = None) -> None:
        self.backbone, self.lines, self.folder = backbone, lines, folder
        # Only Table 2 uses the Decathlon.
        self.archive = archive_in(folder) if folder and backbone == "resnet26" else None
        self.origin = origin(self.archive)
        self._net: cn.MultiDomainNetwork | None = None
        self._data: dict[str, domains.Split] = {}
        self._digests: dict[str, str] = {}
        self._parts: dict[str, dict[str, Batches]] = {}

    @functools.cached_property
    def domains(self) -> tuple[str, ...]:
        """Our domains, or those of the folder."""
        if self.archive is not None:
            return self.archive.names
        return domains.DOMAINS if self.folder is None else originals.names(self.folder)

    @functools.cached_property
    def weights(self) -> str:
        """The name of the ResNet-26; for an archive this reads a large file."""
        return weights(self.archive)

    @property
    def net(self) -> cn.MultiDomainNetwork:
        """The frozen network, loaded on first use."""
        if self._net is None:
            files = {"vgg16": vgg16_file, "resnet26": lambda: resnet26_file(self.archive)}
            source = files.get(self.backbone, lambda: self.backbone)()
            net = cn.load_backbone(source).to(memory_format=torch.channels_last)
            self._net = cn.MultiDomainNetwork(net)
        return self._net

    def data(self, domain: str) -> domains.Split:
        """Return the images and labels of a domain, from the folder or from ours."""
        if domain not in self._data:
            if self.folder is None or domain not in self.domains:
                self._data[domain] = domains.load(domain)
            elif self.archive is not None:
                self._data[domain] = originals.dataset(domain, self.archive)
            else:
                self._data[domain] = originals.load(domain, self.folder)
        return self._data[domain]

    def images(self, domain: str) -> str:
        """Return a digest of a domain's images: other images make other rows."""
        if domain not in self._digests:
            parts = {k: v for k, v in self.data(domain)._asdict().items() if k != "classes"}
            self._digests[domain] = digest(parts)[:8]
        return self._digests[domain]

    def parts(self, domain: str) -> dict[str, Batches]:
        """Return the loaders "train" (shuffled), "plain" (the same in order), "val" and "test"."""
        if domain not in self._parts:
            data, preprocessing = self.data(domain), preprocessing_of(self.net.backbone)
            archived = self.archive is not None and domain in self.domains
            size = originals.PIXELS if archived else PIXELS[self.backbone]

            def sized(x: torch.Tensor) -> torch.Tensor:
                parts = (prepare(few, size, 0.0, 1 / 255).round() for few in x.split(1000))
                return torch.cat([few.to(torch.uint8) for few in parts])

            x, y = sized(data.x_train), data.y_train
            self._parts[domain] = {
                "train": Batches(x, y, preprocessing, BATCH, shuffle=True),
                "plain": Batches(x, y, preprocessing, 100),
                "val": Batches(sized(data.x_val), data.y_val, preprocessing, 100),
                "test": Batches(sized(data.x_test), data.y_test, preprocessing, 100),
            }
        return self._parts[domain]

    def rate(self, kind: str) -> float:
        """Return the learning rate of a kind on this backbone."""
        return rate(self.backbone, kind)

    # ── cells ────────────────────────────────────────────────────────────────────────────────

    def trained(self, domain: str, seed: int) -> str:
        """Return the name of a domain with trained residual adapters; train them if necessary."""
        name = f"ra-{domain}-{seed}"
        if name in self.net.domains:
            return name
        for other in [n for n in self.net.domains if n.startswith(f"ra-{domain}-")]:
            self.net.remove_domain(other)
        folder = self.place("ra", domain, seed, self.rate("ra"))
        if not folder.exists():
            self.cell("ra", domain, seed, epochs=EPOCHS, again=True)
        self.net.load_domain(folder, name)
        return name

    def start(self, name: str) -> dict[str, str]:
        """Return a digest of a domain's A, for the rows that start from it.

        A lost A is retrained, and on another machine the result differs.
        """
        return {"A": digest(self.net.domains[name].state_dict())[:8]}

    def place(self, method: str, domain: str, seed: int, lr: float) -> Path:
        """Return the folder that keeps a trained A between runs."""
        name = f"{method}-{domain}-{self.images(domain)}-{seed}-{lr:g}-{EPOCHS}"
        net = self.weights if self.backbone == "resnet26" else self.backbone
        return cache() / "paper" / net / name

    def cell(
        self,
        method: str,
        domain: str,
        seed: int,
        *,
        lr: float | None = None,
        epochs: int | None = None,
        again: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the row of a cell; measure it if it is missing, or if `again`."""
        lr = self.rate(kind(method, options)) if lr is None else lr
        key = self.where(domain, seed) | cell_key(
            self.backbone, method, options, lr=lr, epochs=epochs
        )
        found = self.lines.find(**key)
        if found is not None and not again:
            return found
        starts = "adapter" in cn.METHODS[method].options
        trained = self.trained(domain, seed) if starts else None
        print("…", *key.values(), flush=True)
        settings = self.settings(method, lr, epochs, seed)
        settings |= self.method_options(method, options, trained)
        parts, start = self.parts(domain), time.perf_counter()
        done: cn.Adapted = cn.adapt(
            self.net,
            "cell",
            parts["train"],
            parts["val"],
            method,
            classes=None if starts else len(self.data(domain).classes),
            start=trained,
            statistics=parts["plain"],
            test=parts["test"] if method == "covnorm" else None,  # accuracy before M is tuned
            progress=False,
            **settings,
        )
        seconds = time.perf_counter() - start
        if method == "ra" and epochs == EPOCHS:
            shutil.rmtree(place := self.place(method, domain, seed, lr), ignore_errors=True)
            self.net.save_domain("cell", place)
        begun = self.start(trained) if trained is not None else {}
        measured = self.measured("cell", parts["test"], done)
        n = len(self.data(domain).y_test)
        row = {**key, **begun, **measured, "n": n, "seconds": round(seconds, 1)}
        self.net.remove_domain("cell")
        return row if found is not None else self.lines.add(row)

    def together(
        self, method: str, names: Sequence[str], seed: int, **options: Any
    ) -> list[dict[str, Any]]:
        """Return the rows of a method that several domains share, one row per domain."""
        lr = self.rate(method)
        key = cell_key(self.backbone, method, options, lr=lr, domains=len(names))
        keys = [self.where(d, seed) | key for d in names]
        found = [self.lines.find(**key) for key in keys]
        if all(found):
            return [row for row in found if row]
        print("…", method, *names, seed, *options.values(), flush=True)
        starts = [self.trained(d, seed) for d in names]
        parts, start = [self.parts(d) for d in names], time.perf_counter()
        cells = [f"cell-{d}" for d in names]
        results: dict[str, cn.Adapted] = cn.adapt(
            self.net,
            cells,
            [p["train"] for p in parts],
            [p["val"] for p in parts],
            method,
            start=starts,
            statistics=[p["plain"] for p in parts],
            progress=False,
            **self.settings(method, lr, None, seed),
            **options,
        )
        seconds = round((time.perf_counter() - start) / len(names), 1)
        rows = []
        for key, cell, A, part in zip(keys, cells, starts, parts, strict=True):
            measured = self.measured(cell, part["test"], results[cell])
            rows.append({**key, **self.start(A), **measured, "seconds": seconds})
        for cell in cells:
            self.net.remove_domain(cell)
        for basis in list(self.net.bases):
            self.net.remove_basis(basis)
        return [self.lines.add(row) for row in rows]

    def where(self, domain: str, seed: int) -> dict[str, Any]:
        """Return the part of a row's key that all experiments share."""
        images = self.images(domain)
        where = {"backbone": self.backbone, "domain": domain, "images": images, "seed": seed}
        return where | ({"weights": self.weights} if self.backbone == "resnet26" else {})

    def settings(self, method: str, lr: float, epochs: int | None, seed: int) -> dict[str, Any]:
        """Return the settings of training, or of tuning if a method starts from a trained A."""
        # ResNet-26's norms have seen only one domain, and BN adapts nothing else.
        statistics = "batch" if method == "bn" or self.backbone == "resnet26" else "frozen"
        shared = {"seed": seed, "norm_statistics": statistics, "schedule": "one-cycle"}
        shared = published(method) | shared
        if "adapter" in cn.METHODS[method].options:
            return {**shared, "tuning": {"epochs": TUNING, "lr": lr, "head_lr": None}}
        return {**shared, "epochs": epochs or WHOLE, "lr": lr}

    def method_options(
        self, method: str, options: Mapping[str, Any], trained: str | None
    ) -> dict[str, Any]:
        """Return the options as `cn.adapt` takes them.

        `ratio` is the same rank of x and y at every site, as a share of its channels.
        """
        result = dict(options)
        if method == "lwf":
            result["source"] = self.parts(self.origin)["test"]  # must not be forgotten
        if "ratio" in result:
            assert trained is not None
            ratio, maps = result.pop("ratio"), self.net.domain(trained).maps
            ranks = {s: rank_of(ratio, *A.matrix().shape) for s, A in maps.items()}
            result["ranks"] = {s: (r, r) for s, r in ranks.items()}
        return result

    def measured(self, name: str, test: Batches, done: cn.Adapted) -> dict[str, Any]:
        """Return accuracy, parameters and bytes of a domain."""
        account, sizes = cn.account(self.net, name), self.sizes(name)
        tested = done.tested or {"final": cn.evaluate(self.net, name, test).accuracy}
        if done.dtype is not None and done.storage is not None:  # stored in the chosen precision
            sizes |= {"bytes": done.storage[done.dtype]["bytes"], "dtype": done.dtype}
        return {
            "accuracy": tested["final"],
            "validation": done.accuracy,
            "tested": tested,
            "stages": done.stages,
            "declined": done.declined,
            **sizes,
            "shared": account.parameters["shared"],
            "of_ra": account.share("ra", ("adapter", "mask")),
            "of_network": account.share("network", ("adapter", "mask")),
            "forgetting": done.forgetting,
        }

    def sizes(self, name: str) -> dict[str, Any]:
        """Return adapter parameters, all parameters, and the bytes of the files in float32."""
        folder = self.net.save_domain(name, cache() / "paper" / f"cell-{os.getpid()}")
        size = sum(f.stat().st_size for f in folder.iterdir())
        shutil.rmtree(folder)
        counted = self.net.num_parameters(name)
        return {"parameters": counted["adapter"], "total": counted["total"], "bytes": size}
