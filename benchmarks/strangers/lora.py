"""PEFT's LoRA with usual settings, on the pointwise convolutions of a frozen backbone."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def lora(net: nn.Module, head: str, x: Tensor, y: Tensor, epochs: int) -> Any:
    """Train LoRA of rank 8 and the head; norms stay as they are, since PEFT does not store them."""
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # absent: a CUDA build fails
    from peft import LoraConfig, get_peft_model

    targets = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    ]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, modules_to_save=[head])
    model = get_peft_model(net, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
    steps = epochs * -(-len(x) // 32)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.eval()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            flipped = (torch.rand(len(batch)) < 0.5).view(-1, 1, 1, 1)
            images = torch.where(flipped, x[batch].flip(-1), x[batch])
            loss = F.cross_entropy(model(images), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model
