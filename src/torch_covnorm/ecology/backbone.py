"""The one backbone of an ecology: by name where a package brings its weights, else kept in it."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..backbones import NAMES, load_backbone, preprocessing_of
from ..errors import CovNormError
from ..network.accounting import denominators
from ..network.network import MultiDomainNetwork
from .blobs import Blobs


def describe(
    backbone: str | os.PathLike[str] | nn.Module, weights: str | os.PathLike[str] | None
) -> tuple[dict[str, Any], nn.Module | None]:
    """What the manifest says of a backbone, and the network whose weights must be kept, if any."""
    if isinstance(backbone, nn.Module):
        name, net, kept = None, backbone, None
    else:
        if str(backbone) in NAMES and weights is None and str(backbone) != "efficientnet-lite0":
            raise CovNormError(
                f"backbone {backbone}: no package brings its weights: give --weights FILE, or "
                "--weights random if that is meant"
            )
        net = load_backbone(backbone, weights)
        own = {kind: n for n, kind in NAMES.items()}
        name = own.get(type(net), str(backbone))
        kept = net if weights is not None or name != str(backbone) else None
    wrapped = MultiDomainNetwork(net)
    description = {
        "name": name,
        "class": type(net).__name__,
        "weights": None,
        "fingerprint": wrapped.fingerprint,
        "parameters": denominators(wrapped)["network"],
        "bytes": sum(t.numel() * t.element_size() for t in net.state_dict().values()),
        "preprocessing": preprocessing_of(net),
    }
    return description, kept


def rebuild(
    description: dict[str, Any], blobs: Blobs, backbone: nn.Module | None
) -> MultiDomainNetwork:
    """The network without domains; its weights must be those that the ecology was made with."""
    if backbone is None:
        if description["name"] is None:
            raise CovNormError(
                f"{blobs.folder.parent}: was made with a {description['class']} of the caller's: "
                "pass it as backbone="
            )
        kept = description["weights"]
        if kept is not None:
            blobs.read(kept)  # names the file, should it be damaged
        backbone = load_backbone(description["name"], kept and blobs.path(kept))
    net = MultiDomainNetwork(backbone.eval())
    if net.fingerprint != description["fingerprint"]:
        raise CovNormError(
            f"{blobs.folder.parent}: was made with another backbone ({description['name']} "
            f"{description['fingerprint'][:12]}), this one is {net.fingerprint[:12]}: install the "
            "version of its weights that made it"
        )
    return net
