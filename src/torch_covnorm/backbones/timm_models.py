"""Models of timm, by their names, and from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import socket
import types
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CovNormError, choices
from .weights import Matched, load_, read_weights

HUB = ("hf-hub:", "hf_hub:")
HUB_SECONDS = 5  # in which a connection to the hub must open
_operators: list[torch.library.Library] = []  # they are gone as soon as nothing refers to them


def import_timm() -> types.ModuleType:
    """Import timm, also beside a torchvision that was built for another torch.

    torchvision's usual wheel is a CUDA build. Beside a CPU build of torch its compiled operators do
    not load, and its import fails at the first that it mentions. timm calls none of them, so it is
    enough that they are declared. Nothing is declared where torchvision works.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _operators:
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.append(library)
    import timm

    return timm


def load_timm(name: str, weights: str | None, known: list[str]) -> tuple[nn.Module, Matched | None]:
    """Load a timm model with its pretrained weights, those of a file, or "random" ones.

    name: a timm name, or "hf-hub:user/model". known: other names, for the error message.
    """
    try:
        timm = import_timm()
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another build
        absent = isinstance(error, ModuleNotFoundError)
        why = "torch-covnorm[timm]" if absent else f"a torchvision that fits torch: {error}"
        other = choices(name, known)
        raise CovNormError(f"backbone {name!r}: {other} (timm models need {why})") from None
    hub = name.startswith(HUB)
    if not hub and not timm.is_model(name):
        raise CovNormError(f"backbone {name!r}: {choices(name, [*known, *timm.list_models()])}")
    try:
        with _no_long_retries():
            net: nn.Module = timm.create_model(name, pretrained=weights is None)
    except Exception as error:  # timm and the hub raise many types
        if weights is not None and not hub:  # not a matter of weights
            raise
        what = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if not hub:
            raise CovNormError(
                f"no timm weights for {name!r} ({what}). Pass weights=FILE or weights='random'."
            ) from error
        raise CovNormError(
            f"backbone {name!r}: cannot be loaded from the hub ({what}). Check the name and the "
            "connection, or download its weights elsewhere and pass the timm name of its "
            "architecture with weights=FILE."
        ) from error
    net.preprocessing = timm_preprocessing(net)  # type: ignore[assignment]
    if weights is None or weights == "random":
        return net, None
    return net, load_(net, read_weights(Path(weights)), name)


def timm_preprocessing(net: nn.Module) -> dict[str, Any]:
    """Return ``{"size", "mean", "std"}`` as timm records it, else ImageNet's usual values."""
    config: Any = getattr(net, "pretrained_cfg", None) or {}
    mean, std = config.get("mean", (0.485, 0.456, 0.406)), config.get("std", (0.229, 0.224, 0.225))
    size = config.get("input_size", (3, 224, 224))[-1]
    return {"size": int(size), "mean": list(mean), "std": list(std)}


@contextlib.contextmanager
def _no_long_retries() -> Iterator[None]:
    """Use only the local cache of the hub if the hub cannot be reached.

    Its client would retry every file for half a minute.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(address: str) -> bool:
    """Return whether a connection opens. With a proxy, only the client itself can tell."""
    url = urllib.parse.urlsplit(address)
    if url.hostname is None or url.scheme in urllib.request.getproxies():
        return True
    port = url.port or {"http": 80}.get(url.scheme, 443)
    with contextlib.suppress(OSError):
        socket.create_connection((url.hostname, port), HUB_SECONDS).close()
        return True
    return False
