"""Every method on one real domain: accuracy, parameters, bytes, seconds. ``make bench-methods``.

The shipped sample of Fashion-MNIST on a frozen pretrained backbone: 850 images for training, 150
for validation (to choose the epoch, and one of two learning rates, for every method alike) and 500
for testing. The joint methods share with a second domain, the digits. One seed: a difference of one
point is noise.

Every run appends a line to benchmarks/results/methods.jsonl; an interrupted benchmark resumes.
``--backbone vgg16`` uses VGG16's ImageNet convolutions at 32 px instead.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch

import torch_covnorm as cn
from torch_covnorm.data import load_sample, prepare

from .ledger import Lines
from .paper.settings import published
from .vgg16_weights import cache, vgg16_file

SEED, BATCH, EPOCHS = 0, 25, 6
PIXELS = {"efficientnet-lite0": 64, "vgg16": 32}
RATES = {"fnft": (3e-4, 1e-3), "lwf": (3e-4, 1e-3), "piggyback": (3e-4, 1e-3)}
STARTS_FROM_A = ("svd", "svd-fta", "pca-fta", "covnorm", "joint-svd", "covnorm-joint")
VARIANCES = (0.99, 0.9)  # for the methods that choose ranks by variance


class Loader:
    """Batches of tensors, in order or shuffled again for every epoch."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, shuffle: bool = False) -> None:
        self.x, self.y, self.shuffle = x, y, shuffle

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __iter__(self):
        order = torch.randperm(len(self.x)) if self.shuffle else torch.arange(len(self.x))
        for part in order.split(BATCH):
            yield self.x[part], self.y[part]


def data(name: str, backbone: str) -> dict[str, Loader]:
    sample = load_sample(name)
    preprocessing = cn.load_backbone(backbone, weights="random").preprocessing
    args = (PIXELS[backbone], preprocessing["mean"], preprocessing["std"])
    x, test = (prepare(v, *args, channels_last=True) for v in (sample.x_train, sample.x_test))
    y = sample.y_train
    return {
        "train": Loader(x[150:], y[150:], shuffle=True),
        "val": Loader(x[:150], y[:150]),
        "test": Loader(test, sample.y_test),
    }


def network(backbone: str) -> cn.MultiDomainNetwork:
    source = vgg16_file() if backbone == "vgg16" else backbone
    net = cn.load_backbone(source).to(memory_format=torch.channels_last)
    return cn.MultiDomainNetwork(net)


class Bench:
    def __init__(self, backbone: str, lines: Lines) -> None:
        self.backbone, self.lines = backbone, lines
        self.net = network(backbone)
        self.domains = {n: data(n, backbone) for n in ("fashion", "digits")}
        self.folder = cache() / "methods" / backbone

    def run(self, method: str, domain: str, rate: float, **options: Any) -> dict[str, Any]:
        """Return the row of a cell; measure it if it is missing."""
        key = {"backbone": self.backbone, "method": method, "domain": domain, "lr": rate, **options}
        found = self.lines.find(**key, seed=SEED)
        if found is not None:
            return found
        print("…", *key.values(), flush=True)
        start = time.perf_counter()
        parts, name = self.domains[domain], "cell"
        settings = published(method) | {"method": method, "lr": rate}
        settings |= {"epochs": EPOCHS, "seed": SEED}
        settings |= options | {"progress": False, "classes": 10}
        if method in RATES:
            settings["schedule"] = "one-cycle"
        if method in STARTS_FROM_A:
            settings["start"] = self.adapters(domain)
            settings["lr"], settings["tuning"] = 3e-3, {"lr": rate, "head_lr": None}
        names = [name]
        if cn.METHODS[method].joint:
            names, other = [name, "other"], "digits" if domain == "fashion" else "fashion"
            settings["start"] = [settings["start"], self.adapters(other)]
            loaders = [[parts[k], self.domains[other][k]] for k in ("train", "val")]
            start = time.perf_counter()
            result = cn.adapt(self.net, names, *loaders, **settings)[name]
        else:
            start = time.perf_counter()
            result = cn.adapt(self.net, name, parts["train"], parts["val"], **settings)
        seconds = time.perf_counter() - start
        row = key | {"seed": SEED} | self.measure(name, names, parts, result)
        row["seconds"] = round(seconds, 1)
        if method == "ra":
            self.net.save_domain(name, self.start_folder(domain, rate))
        for n in names:
            self.net.remove_domain(n)
        for n in list(self.net.bases):
            self.net.remove_basis(n)
        return self.lines.add(row)

    def measure(
        self, name: str, names: list[str], parts: dict[str, Loader], result: cn.Adapted
    ) -> dict[str, Any]:
        test = cn.evaluate(self.net, name, parts["test"])
        folder = self.net.save_domain(name, self.folder / "cell")
        size = sum(f.stat().st_size for f in folder.iterdir())
        shutil.rmtree(folder)
        account = cn.account(self.net, name)
        return {
            "accuracy": test.accuracy,
            "validation": result.accuracy,
            "stages": result.stages,
            "parameters": result.parameters["adapter"],
            "total": result.parameters["total"],
            "shared": account.parameters["shared"],
            "sharing": len(names),
            "bytes": size,
            "share_of_ra": account.share("ra", ("adapter", "mask")),
            "share_of_network": account.share("network", ("adapter", "mask")),
            "forgetting": result.forgetting,
        }

    def start_folder(self, domain: str, rate: float) -> Path:
        return self.folder / f"ra-{domain}-{rate}"

    def adapters(self, domain: str) -> str:
        """Return the name of a domain whose RA was trained at the better of two rates."""
        name = f"ra-{domain}"
        if name not in self.net.domains:
            rows = [self.run("ra", domain, rate) for rate in (1e-3, 3e-3)]
            best = max(rows, key=lambda r: r["validation"])
            self.net.load_domain(self.start_folder(domain, best["lr"]), name)
        return name


def cells(bench: Bench, methods: list[str]) -> None:
    for method in methods:
        variants: list[dict[str, Any]] = [{}]
        if "variance" in cn.METHODS[method].options:
            variants = [{"variance": t} for t in VARIANCES]
        for options in variants:
            for rate in RATES.get(method, (1e-3, 3e-3)):
                bench.run(method, "fashion", rate, **options)
                if method == "svd":
                    break  # nothing is tuned


def table(lines: Lines, backbone: str) -> str:
    """Format each method at the rate that validated better."""
    heads = "method", "test accuracy", "adapter parameters", "of RA's", "all", "file", "seconds"
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in lines.rows:
        if row["backbone"] != backbone or row["domain"] != "fashion":
            continue
        key = (row["method"], row.get("variance"))
        if key not in rows or row["validation"] > rows[key]["validation"]:
            rows[key] = row
    order = {method: i for i, method in enumerate(cn.METHODS)}
    for (method, t), r in sorted(rows.items(), key=lambda item: order[item[0][0]]):
        label = method if t is None else f"{method}, t = {t}"
        shared = f" (+ {r['shared']:,} shared by {r['sharing']})" if r["shared"] else ""
        out.append(
            f"| {label} | {r['accuracy']:.1f} % | {r['parameters']:,}{shared} | "
            f"{r['share_of_ra']:.1%} | {r['total']:,} | {r['bytes'] / 1e3:,.0f} kB | "
            f"{r['seconds']:.0f} |"
        )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", choices=sorted(PIXELS), default="efficientnet-lite0")
    parser.add_argument("--only", default=",".join(cn.METHODS), help="methods, separated by commas")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--table", action="store_true", help="print existing results, run nothing")
    options = parser.parse_args()
    lines = Lines("methods", options.fresh)
    if not options.table:
        cells(Bench(options.backbone, lines), options.only.split(","))
    print(table(lines, options.backbone))


if __name__ == "__main__":
    main()
