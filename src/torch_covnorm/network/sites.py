"""Where adapters go: the sites of a backbone, its head, and the norm after each site."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..adapters import Layer, Site
from ..errors import CovNormError, CovNormWarning, check_choice, choices

NORMS = ("shared", "sites", "own")
SitePredicate = Callable[[str, nn.Module], bool]


def find_sites(
    backbone: nn.Module, predicate: SitePredicate | None, head: str | None
) -> dict[str, Site]:
    """Return the sites of a backbone in registration order: the predicate's, or `default`.

    By default, layers that are smaller than their series adapter are left out if others remain.
    If the predicate picks them, a warning names them.
    """
    layers = {n: m for n, m in _layers(backbone).items() if n != head}
    if predicate is None:
        chosen = default(backbone, layers)
    else:
        chosen = {n: m for n, m in layers.items() if predicate(n, m)}
    for name, layer in chosen.items():
        if _is_uncalled(layer):
            raise CovNormError(
                f"site {name!r}: nn.MultiheadAttention reads the weight of its out_proj but never "
                "calls it, so an adapter would not run. Leave it out of sites=."
            )
    if not chosen:
        raise CovNormError(
            f"no site found in {type(backbone).__name__}: it needs a Conv2d or Linear layer "
            "besides the head, one that sites=(name, module) accepts"
        )
    heavy = [n for n, m in chosen.items() if _outweighs(m) and not _is_stem(m)]
    if heavy:
        warnings.warn(
            f"the adapter outweighs its layer at {len(heavy)} of {len(chosen)} sites "
            f"({', '.join(heavy[:4])}{', …' if len(heavy) > 4 else ''}). "
            "Choose other sites with sites=, or compress the adapters.",
            CovNormWarning,
            stacklevel=3,
        )
    norms = _following_norms(backbone)
    return {
        n: Site(n, isinstance(m, nn.Conv2d), *_channels(m), norms.get(n)) for n, m in chosen.items()
    }


def default(backbone: nn.Module, layers: dict[str, Layer]) -> dict[str, Layer]:
    """Return the default sites.

    VGG and ResNet: the stem, and the convolutions and hidden Linear layers that are larger than
    their adapter. Networks with depthwise convolutions (EfficientNet, MobileNet, ConvNeXt): only
    the projections. ViT: the layers that write to the residual stream. Otherwise every layer.
    """
    # Squeeze-and-excitation gates have tiny layers that are not adapted.
    squeezes = [n for n, m in backbone.named_modules() if type(m).__name__.startswith("Squeeze")]
    gates = tuple(n + "." for n in squeezes if n)
    usable = {n: m for n, m in layers.items() if not _is_uncalled(m) and not n.startswith(gates)}
    depthwise = any(
        isinstance(m, nn.Conv2d) and 1 < m.groups == m.in_channels for m in usable.values()
    )
    pick = _is_projection if depthwise else lambda m: not _outweighs(m) or _is_stem(m)
    return {n: m for n, m in usable.items() if pick(m)} or usable


def find_head(backbone: nn.Module, head: str | None) -> str | None:
    """Return the layer that each domain replaces: by name, the last Linear for "auto", or None."""
    layers = _layers(backbone)
    if head == "auto":
        plain = {n: m for n, m in layers.items() if not _is_uncalled(m)}
        return next((n for n, m in reversed(plain.items()) if isinstance(m, nn.Linear)), None)
    if head is not None and head not in layers:
        raise CovNormError(
            f"head={head!r} is not a Conv2d or Linear layer: {choices(head, layers)}"
        )
    return head


def find_norms(backbone: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorms of the backbone by name."""
    return {n: m for n, m in backbone.named_modules() if isinstance(m, _BatchNorm)}


def copied_norms(
    backbone: nn.Module, sites: Mapping[str, Site], norms: str
) -> dict[str, _BatchNorm]:
    """Return the norms of the backbone that a domain copies; it shares the others.

    norms: "shared" (it copies none), "sites" (those that follow a site) or "own" (all).
    """
    check_choice("norms", norms, NORMS)
    behind = {site.norm_behind for site in sites.values()}
    return {
        n: norm
        for n, norm in find_norms(backbone).items()
        if norms == "own" or (norms == "sites" and n in behind)
    }


def _layers(backbone: nn.Module) -> dict[str, Layer]:
    return {n: m for n, m in backbone.named_modules() if isinstance(m, Layer)}


def _channels(layer: Layer) -> tuple[int, int]:
    d_out, d_in = layer.weight.shape[:2]
    return d_in * getattr(layer, "groups", 1), d_out


def _is_uncalled(layer: Layer) -> bool:
    """Return whether it is the out_proj of nn.MultiheadAttention, which reads only its weight."""
    return isinstance(layer, NonDynamicallyQuantizableLinear)


def _outweighs(layer: Layer) -> bool:
    d = layer.weight.shape[0]  # an adapter's A is d × d
    return d * d > layer.weight.numel()


def _is_stem(layer: Layer) -> bool:
    """Return whether it convolves the image: small, but one of the 13 adapted layers of VGG16."""
    return isinstance(layer, nn.Conv2d) and layer.in_channels <= 4 and layer.groups == 1


def _is_projection(layer: Layer) -> bool:
    d_in, d_out = _channels(layer)
    return d_out <= d_in and getattr(layer, "kernel_size", (1, 1)) == (1, 1)


def _following_norms(backbone: nn.Module) -> dict[str, str]:
    """Return {layer: the BatchNorm registered next in the same parent, with as many channels}."""
    following = {}
    for parent_name, parent in backbone.named_modules():
        prefix = parent_name + "." if parent_name else ""
        children = [(n, m) for n, m in parent.named_children() if type(m) is not nn.Identity]
        for (name, layer), (norm_name, norm) in itertools.pairwise(children):
            normed = isinstance(norm, _BatchNorm) and isinstance(layer, Layer)
            if normed and norm.num_features == len(layer.weight):
                following[prefix + name] = prefix + norm_name
    return following
