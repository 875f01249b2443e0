"""ResNet-26 for the mini-Decathlon, pretrained here on one domain: CIFAR-10's objects.

The images differ from those that `domains.load("objects")` validates and tests on. With the
Decathlon's archive, the network is pretrained on its imagenet12.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import torch_covnorm as cn
from torch_covnorm.backbones import preprocessing_of
from torch_covnorm.data.loader import Batches

from .. import domains
from ..fetch import cache, members, sha256
from ..originals import SOURCE, Archive
from ..readers import READERS, take

DOMAIN, IMAGES, BATCH, EPOCHS, LR, SEED = "objects", 10_000, 64, 8, 3e-3, 0


def origin(archive: Archive | None = None) -> str:
    """Return what ResNet-26 is trained on: the Decathlon's source if present, else our objects."""
    return SOURCE if archive is not None and SOURCE in archive.names else DOMAIN


def weights(archive: Archive | None = None) -> str:
    """Return the name of the network in `resnet26_file`."""
    which: str | int = IMAGES
    if archive is not None and origin(archive) == SOURCE:
        which = sha256(archive.annotations(SOURCE)["train"])[:8]
    return f"resnet26-{origin(archive)}-{which}-{EPOCHS}"


def resnet26_file(archive: Archive | None = None) -> Path:
    """Return the weights as a safetensors file; the first call trains them and can be resumed."""
    file = cache() / f"{weights(archive)}.safetensors"
    if file.exists():
        return file
    torch.manual_seed(SEED)
    net = cn.load_backbone("resnet26", weights="random")
    train: Batches | DataLoader[tuple[torch.Tensor, int]]
    if archive is not None and origin(archive) == SOURCE:
        part = archive.split(SOURCE, "train")
        train, classes = part.loader(BATCH), len(part.classes)
    else:
        train, classes = Batches(*images(), preprocessing_of(net), BATCH, shuffle=True), 10
    net.fc = torch.nn.Linear(net.fc.in_features, classes)
    steps = EPOCHS * len(train)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    kept, written = file.with_suffix(".part"), file.with_suffix(".new")
    begun = _load(kept, net, optimizer, schedule) if kept.exists() else 0
    net.to(memory_format=torch.channels_last).train()
    for epoch in range(begun, EPOCHS):
        torch.manual_seed(SEED + 1 + epoch)  # so that a resumed run is the same run
        total = 0.0
        for x, y in train:
            flip = torch.rand(len(x)) < 0.5
            x = torch.where(flip[:, None, None, None], x.flip(3), x)
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"… resnet26, epoch {epoch + 1} of {EPOCHS}: {total / len(train):.3f}", flush=True)
        states = [part.state_dict() for part in (net, optimizer, schedule)]
        torch.save({"epoch": epoch + 1, "states": states}, written)
        written.replace(kept)
    whole = {k: v.contiguous() for k, v in net.state_dict().items()}
    safetensors.torch.save_file(whole, written)
    written.replace(file)
    kept.unlink()
    return file


def _load(kept: Path, *parts: object) -> int:
    found = torch.load(kept, weights_only=True)
    for part, state in zip(parts, found["states"], strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    return int(found["epoch"])


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (n, 3, 32, 32) uint8 and y (n,), without the benchmark's validation images."""
    pool, _ = READERS[DOMAIN](members(DOMAIN))
    held_out = domains.load(DOMAIN).x_val.permute(0, 2, 3, 1)
    taken = {hashlib.sha256(image.numpy().tobytes()).digest() for image in held_out}
    free = {
        key: pair
        for key, pair in pool.items()
        if hashlib.sha256(pair[0].tobytes()).digest() not in taken
    }
    chosen = take(free, dict.fromkeys(range(10), IMAGES // 10)).values()
    x = torch.stack([torch.from_numpy(image.copy()) for image, _ in chosen])
    return x.permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in chosen])
