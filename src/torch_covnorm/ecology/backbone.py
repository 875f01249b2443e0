"""The one backbone of an ecology: by name if a package provides its weights, else stored here.

A backbone given as ``file.py:function`` is stored with its source (`code`) and its weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..backbones import NAMES, load_backbone, load_matched, preprocessing_of
from ..backbones.packages import PACKAGED
from ..backbones.timm_models import HUB
from ..backbones.weights import Matched, load_, read_weights
from ..errors import CovNormError
from ..network.accounting import denominators
from ..network.network import MultiDomainNetwork
from . import code
from .blobs import Blobs


@dataclass(frozen=True)
class Described:
    """A backbone on its way into an ecology.

    manifest: what the manifest says about it. tensors: the weights to store, if any. source: the
    code to store, and the name of its function, if it is code. matched: how the tensors of a file
    of weights became those of the network.
    """

    manifest: dict[str, Any]
    tensors: dict[str, Tensor] | None = None
    source: tuple[bytes, str] | None = None
    matched: Matched | None = None

    def write(self, blobs: Blobs) -> dict[str, Any]:
        """Write the blobs, and return what the manifest says with their names in it."""
        manifest = dict(self.manifest)
        if self.tensors is not None:
            manifest["weights"] = blobs.write_tensors(self.tensors)
        if self.source is not None:
            data, function = self.source
            manifest["code"] = {"source": blobs.write(data, "py"), "function": function}
        return manifest


def describe(
    backbone: str | os.PathLike[str] | nn.Module, weights: str | os.PathLike[str] | None
) -> Described:
    """Load a backbone and describe it."""
    name: str | None = None
    stored, source, matched = False, None, None
    if isinstance(backbone, nn.Module):
        net = backbone
    elif code.is_function(given := os.fspath(backbone)):
        source, name, stored = code.read_function(given), Path(given).name, True
        net = code.run(*source, origin=given)
        if weights is not None and weights != "random":
            matched = load_(net, read_weights(Path(weights)), name)
    else:
        if given in NAMES and weights is None and given not in PACKAGED:
            raise CovNormError(
                f"backbone {backbone}: no installed package provides its weights. Pass --weights "
                "FILE, or --weights random for an untrained network."
            )
        net, matched = load_matched(given, weights)
        name = {cls: known for known, cls in NAMES.items()}.get(type(net), given)
        stored = weights is not None or name != given or given.startswith(HUB)
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
    # Clones: tied parameters share memory, and safetensors refuses that.
    tensors = {k: v.clone().contiguous() for k, v in net.state_dict().items()} if stored else None
    return Described(description, tensors, source, matched)


def rebuild(
    description: dict[str, Any],
    blobs: Blobs,
    backbone: nn.Module | None,
    trust_code: bool = False,
) -> MultiDomainNetwork:
    """Return the network without domains; refuse weights other than those of the ecology.

    trust_code: run the store's code even if this user has not approved it.
    """
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
        if "code" in description:
            backbone = _from_code(description, blobs, trust_code)
        else:
            backbone = load_backbone(description["name"], weights and blobs.path(weights))
    net = MultiDomainNetwork(backbone.eval())
    if net.fingerprint != description["fingerprint"]:
        raise CovNormError(
            f"{folder}: was made with another backbone. Its {description['name']} has the "
            f"fingerprint {description['fingerprint'][:12]}, this one has {net.fingerprint[:12]}. "
            "Install the version of the weights that it was made with."
        )
    return net


def _from_code(description: dict[str, Any], blobs: Blobs, trust_code: bool) -> nn.Module:
    """Run the store's code, if it may run, and load the stored weights into its network."""
    blob, function = description["code"]["source"], description["code"]["function"]
    data, file = blobs.read(blob), blobs.path(blob)  # an error here: the source was changed
    if not trust_code:
        code.check_approved(data, function, file)
    net = code.run(data, function, origin=str(file))
    if description["weights"] is not None:
        weights = read_weights(blobs.path(description["weights"]))
        load_(net, weights, description["name"], by_order=False)
    return net
