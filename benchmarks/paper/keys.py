"""Keys that tell one experiment from another: a measurement writes them, the page looks them up.

A key leaves out where a row was measured: the domain, its images and the seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch_covnorm as cn

from ..domains import DOMAINS
from .settings import EPOCHS, LONGER, WHOLE, kind, rate

# A field that a row lacks counts as None.
FIELDS = (
    *("backbone", "method", "way", "share", "ratio", "sharing", "tuned"),
    *("lr", "epochs", "options"),
)
SPECTRA = {"backbone": "vgg16", "method": "spectra"}


def cell(
    backbone: str,
    method: str,
    options: Mapping[str, Any] | None = None,
    *,
    lr: float | None = None,
    epochs: int | None = None,
    domains: int = len(DOMAINS),
) -> dict[str, Any]:
    """Return the key of a method; a joint method is shared by `domains` domains."""
    options = {**(options or {}), **({"sharing": domains} if cn.METHODS[method].joint else {})}
    key = {"backbone": backbone, "method": method}
    key |= {"lr": lr or rate(backbone, kind(method, options)), "epochs": epochs or WHOLE}
    return {**key, "options": options}


def start(backbone: str, lr: float | None = None) -> dict[str, Any]:
    """Return the key of the A that the compressed methods start from: RA after fewer epochs."""
    return cell(backbone, "ra", lr=lr, epochs=EPOCHS)


def longer(backbone: str) -> dict[str, Any]:
    """Return the key of RA trained for more epochs than usual."""
    return cell(backbone, "ra", epochs=LONGER)


def cut(
    backbone: str, way: str, share: int, tuned: bool, lr: float | None = None
) -> dict[str, Any]:
    """Return the key of an A cut to 1/share of its parameters."""
    key = {"backbone": backbone, "method": "cut", "way": way, "share": share, "tuned": tuned}
    return {**key, "lr": lr or rate(backbone, f"cut-{way}")} if tuned else key


def shared(backbone: str, way: str, ratio: float, sharing: int, tuned: bool) -> dict[str, Any]:
    """Return the key of joint mode at equal ranks, with shared bases of one kind."""
    key = {"backbone": backbone, "method": "shared", "way": way, "ratio": ratio}
    key |= {"sharing": sharing, "tuned": tuned}
    return {**key, "lr": rate(backbone, "shared")} if tuned else key
