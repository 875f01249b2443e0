"""Speed of the core of the library, as ratios within one run: ``make bench`` on an idle machine.

Every entry is saved to benchmarks/results/core.json as soon as it is measured; an interrupted run
resumes. ``--fresh`` discards existing entries; ``--only moments,vgg16`` runs only the measurements
whose names start with one of these.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.decomposition import IncrementalPCA
from torch import nn

import torch_covnorm as cn
from torch_covnorm.network.routing import plain_copy

from .ledger import Ledger, seconds
from .vgg16_weights import vgg16_file


def digits(side: int, mean: float, std: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    x = torch.tensor(data.images[:count], dtype=torch.float32)[:, None] / 16
    x = F.interpolate(x, size=(side, side), mode="bilinear").expand(-1, 3, -1, -1)
    x = ((x - mean) / std).contiguous(memory_format=torch.channels_last)
    return x, torch.tensor(data.target[:count])


def trained(backbone: nn.Module, x: torch.Tensor, y: torch.Tensor) -> cn.MultiDomainNetwork:
    """Return a network with adapters trained briefly on digits, normalised (t = 0.99), absorbed."""
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(backbone.to(memory_format=torch.channels_last))
    net.add_domain("d0", classes=10)
    optimizer = torch.optim.AdamW(net.parameters_of("d0"), lr=1e-3)
    net.train()
    for images, labels in zip(x.split(32), y.split(32), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(net(images, domain="d0"), labels).backward()
        optimizer.step()
    cn.normalize_(net, "d0", cn.collect(net, "d0", x.split(32)), variance=0.99)
    cn.absorb_(net, "d0")
    return net.eval()


def copies(net: cn.MultiDomainNetwork, count: int) -> list[str]:
    """Add domains of equal size with different weights, up to `count`; return their names."""
    for i in range(len(net.domains), count):
        domain = copy.deepcopy(net.domains["d0"])
        domain.name = f"d{i}"
        with torch.no_grad():
            for p in domain.parameters():
                p.mul_(1 + 1e-3 * i)
        net.domains[f"d{i}"] = domain
    return [f"d{i}" for i in range(count)]


def moments_against_matmul(d: int) -> dict[str, Any]:
    """Compare with x.T @ x on features as B1 gives them; `shifted` has a mean of 10 deviations."""
    x = torch.randn((1 << 24) // d, d)
    shifted = x + 10
    bare, ours, centring = seconds(
        lambda: x.T @ x,
        lambda: cn.Moments(d).update(x),
        lambda: cn.Moments(d).update(shifted),
        rounds=31,
    )
    ratio = bare / ours
    return {"ratio": ratio, "goal": ">= 0.6", "met": ratio >= 0.6, "shifted": bare / centring}


def moments_against_sklearn(d: int) -> dict[str, Any]:
    """Compare 16 batches of 4096 rows (32 images of 128 positions), with the PCA at the end."""
    blocks = torch.randn(16 * 4096, d).split(4096)
    array = [b.numpy() for b in blocks]

    def theirs() -> None:
        pca = IncrementalPCA()
        for block in array:
            pca.partial_fit(block)

    def ours() -> None:
        m = cn.Moments(d)
        for block in blocks:
            m.update(block)
        m.pca()

    slow, fast = seconds(theirs, ours, rounds=3, warm=1)
    return {"ratio": slow / fast, "goal": ">= 10", "met": slow / fast >= 10}


@torch.no_grad()
def inference(net: cn.MultiDomainNetwork, x: torch.Tensor) -> dict[str, Any]:
    merged = net.merge("d0")
    bare = plain_copy(net.backbone)
    bare.set_submodule(
        net.head_name, copy.deepcopy(net.domains["d0"].head)
    )  # a head of the same width
    ones = seconds(lambda: bare(x), lambda: net(x, domain="d0"), lambda: merged(x))
    adapted, folded = ones[1] / ones[0], ones[2] / ones[0]
    return {
        "ratio": adapted,
        "goal": "<= 1.15",
        "met": adapted <= 1.15,
        "merged": folded,
        "merged_goal": "<= 1.03",
        "merged_met": folded <= 1.03,
        "bare_images_per_second": len(x) / ones[0],
        "adapter_parameters": net.num_parameters("d0")["adapter"],
        "share_of_A": net.num_parameters("d0")["adapter"]
        / sum(s.d_out**2 for s in net.sites.values()),
    }


@torch.no_grad()
def mixed(net: cn.MultiDomainNetwork, x: torch.Tensor) -> dict[str, Any]:
    names = copies(net, 32)

    def one_by_one() -> None:
        for i, name in enumerate(names):
            net(x[i : i + 1], domain=name)

    one, many, loop = seconds(
        lambda: net(x, domain="d0"), lambda: net(x, domain=names), one_by_one, rounds=11
    )
    return {
        "ratio": many / one,
        "goal": "<= 1.5",
        "met": many / one <= 1.5,
        "loop_over_domains": loop / one,
        "images_per_second": len(x) / many,
    }


@torch.no_grad()
def switching(count: int) -> dict[str, Any]:
    """Compare a call that changes the domain with one that repeats it."""
    torch.manual_seed(0)
    net = cn.MultiDomainNetwork(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    )
    net.add_domain("d0", 4)
    names = copies(net.eval(), count)
    x, turn = torch.randn(1, 16), itertools.cycle(names)
    same, other = [], []
    for i in range(6000):
        name = next(turn) if i % 2 else "d0"
        if i % 2 == 0:
            net(x, domain="d0")  # so that d0 is cached for the next call
        start = time.perf_counter()
        net(x, domain=name)
        (other if i % 2 else same).append(time.perf_counter() - start)
    cost = 1e6 * (sorted(other)[len(other) // 2] - sorted(same)[len(same) // 2])
    return {"microseconds": cost, "goal": "< 50", "met": cost < 50, "domains": count}


def measurements() -> dict[str, Any]:
    nets: dict[str, Any] = {}

    def vgg16() -> tuple[cn.MultiDomainNetwork, torch.Tensor]:
        if "vgg16" not in nets:
            x, y = digits(64, 0.45, 0.225, 320)
            nets["vgg16"] = trained(cn.load_backbone(vgg16_file()), x, y), x[:32].clone()
        return nets["vgg16"]

    def lite0() -> tuple[cn.MultiDomainNetwork, torch.Tensor]:
        if "lite0" not in nets:
            x, y = digits(72, 127 / 255, 128 / 255, 960)
            nets["lite0"] = trained(cn.load_backbone("efficientnet-lite0"), x, y), x[:32].clone()
        return nets["lite0"]

    out: dict[str, Any] = {}
    for d in (64, 128, 256, 512):
        out[f"moments / matmul, d={d}"] = lambda d=d: moments_against_matmul(d)
        out[f"moments / IncrementalPCA, d={d}"] = lambda d=d: moments_against_sklearn(d)
    for count in (10, 1_000, 10_000):
        out[f"switching, {count} domains"] = lambda count=count: switching(count)
    for name, net in (("vgg16 at 64 px", vgg16), ("efficientnet-lite0 at 72 px", lite0)):
        out[f"{name}: adapted / bare"] = lambda net=net: inference(*net())
        out[f"{name}: 32 domains / one"] = lambda net=net: mixed(*net())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    ledger = Ledger("core", options.fresh)
    for name, measure in measurements().items():
        if any(name.startswith(only) for only in options.only.split(",")):
            entry = ledger.run(name, measure)
            show(name, entry.get("ratio", entry.get("microseconds")), entry["goal"], entry["met"])
            if "merged" in entry:
                show("   merged / bare", entry["merged"], entry["merged_goal"], entry["merged_met"])


def show(name: str, value: float, goal: str, met: bool) -> None:
    print(f"{name:46} {value:8.2f}   {goal:8} {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
