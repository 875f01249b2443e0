"""The one backbone of an ecology: by name if a package provides its weights, else stored here."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from ..backbones import NAMES, load_backbone, preprocessing_of
from ..errors import CovNormError
from ..network.accounting import denominators
from ..network.network import MultiDomainNetwork
from .blobs import Blobs


def describe(
    backbone: str | os.PathLike[str] | nn.Module, weights: str | os.PathLike[str] | None
) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Return the manifest's description of a backbone, and the weights to store, if any."""
    name, stored = None, None
    if isinstance(backbone, nn.Module):
        net = backbone
    else:
        if str(backbone) in NAMES and weights is None and str(backbone) != "efficientnet-lite0":
            raise CovNormError(
                f"backbone {backbone}: no installed package provides its weights. Pass --weights "
                "FILE, or --weights random for an untrained network."
            )
        net = load_backbone(backbone, weights)
        name = {cls: known for known, cls in NAMES.items()}.get(type(net), str(backbone))
        if weights is not None or name != str(backbone):
            stored = {k: v.contiguous() for k, v in net.state_dict().items()}
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
    return description, stored


def rebuild(
    description: dict[str, Any], blobs: Blobs, backbone: nn.Module | None
) -> MultiDomainNetwork:
    """Return the network without domains; refuse weights other than those of the ecology."""
    folder = blobs.folder.parent
    if backbone is None:
        if description["name"] is None:
            raise CovNormError(
                f"{folder}: the backbone is a {description['class']} that was passed from Python. "
                "Pass it again as backbone=."
            )
        weights = description["weights"]
        if weights is not None:
            blobs.read(weights)  # an error here names the damaged file
        backbone = load_backbone(description["name"], weights and blobs.path(weights))
    net = MultiDomainNetwork(backbone.eval())
    if net.fingerprint != description["fingerprint"]:
        raise CovNormError(
            f"{folder}: was made with another backbone. Its {description['name']} has the "
            f"fingerprint {description['fingerprint'][:12]}, this one has {net.fingerprint[:12]}. "
            "Install the version of the weights that it was made with."
        )
    return net
