"""The whole method of the paper, top to bottom, on a real network and real images.

A pretrained EfficientNet-Lite0 stays frozen. One domain, scikit-learn's handwritten digits, gets
residual adapters A. The covariance of its input compresses each A to C·M·W; M is then tuned and
absorbed. Prints accuracy and parameters before and after compression.

Run it with ``make recipe``; it takes about two minutes on two cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

import torch_covnorm as cn

SEED, PIXELS, BATCH = 0, 64, 50
VARIANCES = (0.99, 0.9)  # the paper's threshold t, and a smaller one


def digits() -> dict[str, tuple[Tensor, Tensor]]:
    """Return 1,797 scanned digits, split 75/25 into train and test; a tenth of train validates."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 * 255
    x = F.interpolate(x, size=(PIXELS, PIXELS), mode="bilinear").expand(-1, 3, -1, -1)
    x = ((x - 127) / 128).contiguous(memory_format=torch.channels_last)  # as Lite0 was trained
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    test, rest = order[: len(x) // 4], order[len(x) // 4 :]
    validation, train = rest[: len(rest) // 10], rest[len(rest) // 10 :]
    parts = {"train": train, "validation": validation, "test": test}
    return {name: (x[part], y[part]) for name, part in parts.items()}


def batches(x: Tensor, y: Tensor, shuffle: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(x)) if shuffle else torch.arange(len(x))
    for part in order.split(BATCH):
        if len(part) > 1 or not shuffle:  # BatchNorm cannot train on one image
            yield x[part], y[part]


@torch.no_grad()
def accuracy(net: cn.MultiDomainNetwork, name: str, x: Tensor, y: Tensor) -> float:
    net.eval()
    right = sum((net(a, domain=name).argmax(1) == b).sum().item() for a, b in batches(x, y))
    return 100 * right / len(x)


def train(net: cn.MultiDomainNetwork, name: str, data: dict, epochs: int, rate: float) -> None:
    """Train the parameters of the domain; the backbone is frozen."""
    optimizer = torch.optim.AdamW(net.parameters_of(name), lr=rate, weight_decay=0.01)
    steps = epochs * -(-len(data["train"][0]) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for epoch in range(epochs):
        net.train()
        start, total = time.perf_counter(), 0.0
        for images, labels in batches(*data["train"], shuffle=True):
            loss = F.cross_entropy(net(images, domain=name), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(images)
        rate_now = len(data["train"][0]) / (time.perf_counter() - start)
        print(
            f"   epoch {epoch + 1}/{epochs}: loss {total / len(data['train'][0]):.3f}, validation "
            f"{accuracy(net, name, *data['validation']):.1f} %, {rate_now:.0f} images/s",
            flush=True,
        )


def main() -> list[tuple[str, float, dict[str, int]]]:
    """Run every stage; return (stage, test accuracy in percent, parameters) for each row."""
    torch.manual_seed(SEED)
    data = digits()
    backbone = cn.load_backbone("efficientnet-lite0").to(memory_format=torch.channels_last)
    whole = sum(p.numel() for p in backbone.parameters())
    net = cn.MultiDomainNetwork(backbone)
    print(f"EfficientNet-Lite0, ImageNet weights, frozen: {whole:,} parameters")
    print(
        f"{len(net.sites)} sites; digits: {', '.join(f'{len(v[0])} {k}' for k, v in data.items())}"
    )
    rows: list[tuple[str, float, dict[str, int]]] = []

    def note(name: str, stage: str) -> None:
        rows.append((stage, accuracy(net, name, *data["test"]), net.num_parameters(name)))

    print("1  train A (residual adapters, norms, head)")
    net.add_domain("digits", classes=10, adapter="residual")
    train(net, "digits", data, epochs=6, rate=3e-3)
    note("digits", "residual adapters (A)")

    print("2  moments of A's input at every site, over the training images")
    moments = cn.collect(net, "digits", batches(*data["train"]))

    for t in VARIANCES:
        name = f"digits-{t}"
        with tempfile.TemporaryDirectory() as folder:  # copy the domain through its files
            net.load_domain(net.save_domain("digits", folder), name)
        print(f"3  normalise: A ≈ C·M·W with {t:.0%} of the variance, M in closed form")
        ranks = cn.normalize_(net, name, moments, variance=t)
        for site, (kx, ky) in list(ranks.items())[::5]:
            d = net.sites[site].d_out
            print(f"   {site:20} d {d:3}  kx {kx:3}  ky {ky:3}  η = ky/kx {ky / kx:.2f}")
        untuned = accuracy(net, name, *data["test"])
        print("4  tune M (with norms and head), then absorb it")
        train(net, name, data, epochs=2, rate=1e-3)
        cn.absorb_(net, name)
        rows.append((f"CovNorm, t = {t}, not tuned", untuned, net.num_parameters(name)))
        note(name, f"CovNorm, t = {t}, tuned")

    print(f"\n{'':30}{'test accuracy':>14}{'adapter parameters':>20}{'of A':>8}{'of the net':>12}")
    for stage, percent, count in rows:
        share, of_net = count["adapter"] / rows[0][2]["adapter"], count["adapter"] / whole
        print(f"{stage:30}{percent:13.1f}%{count['adapter']:20,}{share:8.1%}{of_net:12.2%}")
    count = rows[-1][2]
    print(
        f"With norms, biases and head the last domain has {count['total']:,} parameters, "
        f"{count['total'] / whole:.2%} of the network."
    )
    return rows


if __name__ == "__main__":
    main()
