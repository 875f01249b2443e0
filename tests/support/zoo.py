"""Backbones that the tests adapt, and domains shaken so that nothing in them is trivial."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torch_covnorm as cn
from torch_covnorm.backbones import VGG16
from torch_covnorm.backbones.timm_models import import_timm

KINDS = ("residual", "parallel", "conv", "batchnorm", "lowrank", "own", "mask")
TRAIN_NORMS = ("batchnorm", "own", "mask")  # kinds whose domains have copies of all norms
# For the domains of a network, in turn: the same for all, or all three in one network.
NORMS = {n: (n,) for n in ("shared", "sites", "own")} | {"mixed": ("sites", "own", "shared")}


class TinyConvNet(nn.Module):
    """Every shape of Conv2d that an adapter can have, with or without norms after the layers."""

    def __init__(self, norms: bool) -> None:
        super().__init__()

        def layer(*args: int, **kwargs) -> nn.Sequential:
            conv = nn.Conv2d(*args, **kwargs)
            norm = nn.BatchNorm2d(conv.out_channels) if norms else nn.Identity()
            return nn.Sequential(conv, norm, nn.ReLU())

        self.stem = layer(3, 8, 3, padding=1)
        self.strided = layer(8, 12, 3, stride=2, padding=1)
        self.dilated = layer(12, 12, 3, padding=2, dilation=2, bias=False)
        self.grouped = layer(12, 8, 3, padding=1, groups=4)
        self.valid = layer(8, 8, (3, 2))  # no padding, an even side
        self.reflected = layer(8, 8, 5, padding=4, padding_mode="reflect")
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.stem, self.strided, self.dilated, self.grouped, self.valid):
            x = part(x)
        return self.head(self.reflected(x).mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 10),
        nn.ReLU(),
        nn.Linear(10, 10),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Linear(10, 4),
    )


def timm_model(name: str, **kwargs) -> nn.Module:
    return import_timm().create_model(name, **kwargs)


def _images(side: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, 3, side, side)


# name → (backbone, batch of n)
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "convnet": (lambda: TinyConvNet(norms=False), _images(16)),
    "convnet with norms": (lambda: TinyConvNet(norms=True), _images(16)),
    "mlp": (mlp, lambda n: torch.randn(n, 12)),
    "vgg16": (lambda: VGG16(fc=False), _images(32)),
    "resnet26": (lambda: cn.load_backbone("resnet26", weights="random"), _images(32)),
    "efficientnet-lite0": (lambda: cn.load_backbone("efficientnet-lite0"), _images(64)),
    "mobilenet-v2": (lambda: cn.load_backbone("mobilenet-v2"), _images(64)),
    "timm resnet18": (lambda: timm_model("resnet18"), _images(64)),
    "timm efficientnet-lite0": (lambda: timm_model("tf_efficientnet_lite0"), _images(64)),
    "timm vit-tiny": (lambda: timm_model("vit_tiny_patch16_224", img_size=64), _images(64)),
}
SMALL = ("convnet", "convnet with norms", "mlp")


def everywhere(_: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d | nn.Linear)


def network(
    name: str,
    kinds: tuple[str, ...] = KINDS,
    seed: int = 0,
    norms: tuple[str, ...] = NORMS["mixed"],
) -> cn.MultiDomainNetwork:
    """A network in eval mode with one shaken domain per kind; small ones adapt every layer.

    norms: of the domains, in turn.
    """
    torch.manual_seed(seed)
    backbone = ZOO[name][0]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cn.CovNormWarning)
        net = cn.MultiDomainNetwork(backbone, sites=everywhere if name in SMALL else None)
    for i, kind in enumerate(kinds):
        which = None if kind in TRAIN_NORMS else norms[i % len(norms)]
        net.add_domain(kind, classes=3 + i % 3, adapter=kind, norms=which)
        shake_(net.domains[kind])
    return net.eval()


@torch.no_grad()
def shake_(domain: nn.Module, size: float = 0.1) -> None:
    """Move every parameter and statistic away from its initial value."""
    for p in domain.parameters():
        p.add_(size * torch.randn_like(p) * (p.abs().mean() + 0.1))
    for name, buffer in domain.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(size * torch.randn_like(buffer))
        elif name.endswith("running_var"):
            buffer.mul_(1 + size * torch.rand_like(buffer))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two tensors are equal up to a share of the largest number."""
    return a.shape == b.shape and (a - b).abs().max() <= tolerance * (1 + b.abs().max())


def backbone_bits(net: cn.MultiDomainNetwork) -> dict[str, bytes]:
    return {k: v.numpy().tobytes() for k, v in net.backbone.state_dict().items()}
