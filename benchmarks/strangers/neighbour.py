"""Run one neighbour on one image folder, in a process of its own, and print its result as JSON.

    python -m benchmarks.strangers.neighbour probe|finetune|lora FOLDER BACKBONE

The images, their size and the validation part are those of `covnorm add`: the project reads and
decodes them. The probe and LoRA choose nothing on validation, so they train on that part too.
Fine-tuning and LoRA have as many epochs as `covnorm add` chooses for that many images.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import torch_covnorm as cn
from torch_covnorm.backbones import preprocessing_of
from torch_covnorm.data import decode, prepare, read_source
from torch_covnorm.training.auto import epochs_for

from .finetune import finetune
from .lora import lora


def main() -> None:
    method, folder, backbone = sys.argv[1:]
    data = decode(read_source(folder))
    torch.manual_seed(0)

    def load() -> nn.Module:
        net = cn.load_backbone(backbone).to(memory_format=torch.channels_last)
        old = net.get_submodule(head_of(net))
        net.set_submodule(head_of(net), nn.Linear(old.in_features, len(data.classes)))
        return net

    net = load()
    about, head = preprocessing_of(net), head_of(net)
    part = {
        name: (prepare(i.x, data.size, about["mean"], about["std"], channels_last=True), i.y)
        for name, i in data.splits.items()
    }
    both = tuple(torch.cat([part["train"][i], part["val"][i]]) for i in (0, 1))
    epochs = epochs_for(len(part["train"][1]))
    with tempfile.TemporaryDirectory() as temporary:
        stored = Path(temporary)
        if method == "probe":
            from .probe import probe

            counted, lines = probe(net, head, *both), probe
            _save(counted, stored)
        elif method == "finetune":
            net = counted = finetune(load, part["train"], part["val"], epochs)
            lines = finetune
            _save(net, stored)
        else:
            net = lora(net, head, *both, epochs)
            counted, lines = net, lora
            net.save_pretrained(stored)
        size = sum(f.stat().st_size for f in stored.rglob("*") if f.suffix != ".md")
    x, y = part["test"]
    result = {
        "pixels": data.size,
        "epochs": None if method == "probe" else epochs,
        "correct": _correct(net.eval(), x, y),
        "files": list(data.splits["test"].files),
        "parameters": sum(p.numel() for p in counted.parameters() if p.requires_grad),
        "bytes": size,
        "lines": code_lines(lines),
    }
    print(json.dumps(result))


def head_of(net: nn.Module) -> str:
    """Return the name of the last Linear."""
    return [name for name, module in net.named_modules() if isinstance(module, nn.Linear)][-1]


def code_lines(function: Callable[..., Any]) -> int:
    """Count the lines of a function without its docstring and blank lines."""
    source = inspect.getsource(function)
    source = source.replace(f'"""{function.__doc__}"""', "")
    return sum(bool(line.strip()) for line in source.splitlines())


def _save(net: nn.Module, folder: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def _correct(net: nn.Module, x: Tensor, y: Tensor) -> str:
    """Return "1" for every image that is classified correctly, else "0"."""
    answers = torch.cat([net(part).argmax(1) for part in x.split(100)])
    return "".join("01"[int(right)] for right in answers == y)


if __name__ == "__main__":
    main()
