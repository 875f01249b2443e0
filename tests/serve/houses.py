"""Ecologies to serve: untrained domains on a real backbone, each with different predictions."""

from __future__ import annotations

import functools
import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from small_ecology import facts
from torch import Tensor
from zoo import NORMS, TRAIN_NORMS, shake_

import torch_covnorm as cn
from torch_covnorm.data import load_sample
from torch_covnorm.data.images import fit_image
from torch_covnorm.data.loader import as_input
from torch_covnorm.ecology import Details, Ecology

NORMALIZATION = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
# name: (adapter, classes, side, fit); one for every kind that a batch handles differently
DOMAINS = {
    "roses": ("residual", 10, 48, "squash"),
    "shells": ("lowrank", 3, 48, "squash"),
    "moths": ("batchnorm", 5, 48, "crop"),
    "coins": ("parallel", 4, 32, "squash"),
    "leaves": ("mask", 6, 48, "squash"),
    "murals": ("none", 3, 224, "squash"),
}
SAMPLES = ("digits", "sketches", "clipart")


def seeded(text: str) -> None:
    torch.manual_seed(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16))


def add(
    net: cn.MultiDomainNetwork,
    name: str,
    adapter: str = "none",
    classes: int = 3,
    side: int = 32,
    fit: str = "squash",
    seed: int = 0,
    norms: str = "own",
    **preprocessing: Any,
) -> None:
    """Add a domain with random weights and a head with clear preferences."""
    seeded(f"{name} {seed}")
    labels = [f"{name}-{i}" for i in range(classes)]
    preprocessing = {"size": side, "fit": fit, **NORMALIZATION, **preprocessing}
    domain = net.add_domain(name, labels, adapter, preprocessing=preprocessing, norms=norms)
    if adapter == "mask":
        domain.pack_()
    else:
        shake_(domain)
    assert domain.head is not None
    with torch.no_grad():
        domain.head.weight.mul_(2)
    domain.eval()


def create(folder: Path, backbone: str = "efficientnet-lite0") -> Ecology:
    return Ecology.create(folder, backbone, None if backbone == "efficientnet-lite0" else "random")


def put(ecology: Ecology, *names: str, replace: bool = False, **options: Any) -> None:
    """Store domains of one kind. Another seed gives other predictions."""
    net = ecology.network()
    for name in names:
        add(net, name, **options)
    ecology.put(net, {name: Details(facts()) for name in names}, replace=replace)


def house(folder: Path) -> Ecology:
    """Create an ecology with every kind of domain: two share a basis, three have statistics.

    Domains of all kinds of norms are among them.
    """
    ecology = create(folder)
    net = ecology.network()
    for i, (name, (adapter, classes, side, fit)) in enumerate(DOMAINS.items()):
        norms = "own" if adapter in TRAIN_NORMS else NORMS["mixed"][i % 3]
        add(net, name, adapter, classes, side, fit, norms=norms)
    ecology.put(net, {name: Details(facts()) for name in DOMAINS})
    share(ecology, "north", "south")
    for name in SAMPLES:
        known(ecology, name, load_sample(name).x_train[:96])
    return ecology


def share(ecology: Ecology, *names: str, seed: int = 0, replace: bool = False) -> None:
    """Store domains that share a basis. Another seed gives another basis."""
    net = ecology.network()
    for name in names:
        add(net, name, "residual", 4, 32, seed=seed)
    seeded(f"images {seed}")
    x = as_input(torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), NORMALIZATION)
    moments = {name: cn.collect(net, name, [x]) for name in names}
    cn.join_(net, list(names), moments, 0.9)
    ecology.put(net, {name: Details(facts()) for name in names}, replace=replace)


@functools.cache
def picture(sample: str = "clipart", i: int = 0, file_format: str = "PNG") -> bytes:
    """Return a real image as a file."""
    pixels = load_sample(sample).x_test[i].permute(1, 2, 0).contiguous().numpy()
    return encoded(Image.fromarray(pixels), file_format)


def stripes() -> bytes:
    """Return an image unlike any that a domain has seen: hard stripes in one colour."""
    pixels = torch.zeros(64, 64, 3, dtype=torch.uint8)
    pixels[::2, :, 0] = 255
    return encoded(Image.fromarray(pixels.numpy()), "PNG")


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def known(ecology: Ecology, name: str, images: Tensor, side: int = 32, examples: int = 8) -> None:
    """Store a domain with the statistics of images (n, 3, h, w), like a trained one."""
    net = ecology.network().eval()
    add(net, name, "residual", 3, side)
    fitted = torch.stack([fit_image(image, side) for image in images])
    moments = cn.collect(net, name, [as_input(part, NORMALIZATION) for part in fitted.split(32)])
    pixels = [image.permute(1, 2, 0).contiguous().numpy() for image in images[:examples]]
    pngs = {f"{i:03}": encoded(Image.fromarray(p)) for i, p in enumerate(pixels)}
    ecology.put(net, {name: Details(facts(), moments=moments, examples=pngs)})
