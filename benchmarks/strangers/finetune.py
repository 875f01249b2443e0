"""Full fine-tuning as it is usually written: AdamW, two rates, flips, the best epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Images = tuple[Tensor, Tensor]


def finetune(load: Callable[[], nn.Module], train: Images, val: Images, epochs: int) -> nn.Module:
    """Return the network of the rate and the epoch that are best on validation."""
    best, kept = (-1.0, 0.0), None
    for rate in (1e-3, 3e-4):
        net, (x, y) = load(), train
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.01)
        steps = epochs * -(-len(x) // 32)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(epochs):
            net.train()
            for batch in torch.randperm(len(x)).split(32):
                flipped = (torch.rand(len(batch)) < 0.5).view(-1, 1, 1, 1)
                images = torch.where(flipped, x[batch].flip(-1), x[batch])
                loss = F.cross_entropy(net(images), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            net.eval()
            with torch.no_grad():
                logits = torch.cat([net(part) for part in val[0].split(100)])
            correct = (logits.argmax(1) == val[1]).float().mean().item()
            score = (correct, -F.cross_entropy(logits, val[1]).item())
            if score > best:
                best, kept = score, copy.deepcopy(net)
    assert kept is not None
    return kept
