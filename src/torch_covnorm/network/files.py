"""A domain as files: tensors in safetensors, the rest in JSON, nothing pickled.

Everything is checked before the network changes: checksums, format, the backbone's fingerprint,
sites, shapes, dtypes, finiteness.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import records
from ..adapters import WeightAdapter, build, own_weights
from ..errors import CovNormError
from .domain import Domain, check_name
from .sites import weight_layers

if TYPE_CHECKING:
    from .basis import Basis
    from .network import MultiDomainNetwork

FORMAT = "torch-covnorm domain"
SCALE = "#scale"  # beside an int8 matrix; no module's name has a "#"
RECORD = "domain.json"
DTYPES = (torch.float32, torch.float16)
STORED = (*DTYPES, torch.int8)
STATISTICS = ("num_batches_tracked", "running_mean", "running_var")


def fingerprint(backbone: nn.Module, head: str | None) -> str:
    """SHA-256 of the backbone's weights and statistics, by name; without the replaced head."""
    state = {
        name: tensor
        for name, tensor in backbone.state_dict().items()
        if isinstance(tensor, Tensor)
        and not name.endswith("num_batches_tracked")
        and not (head and name.startswith(head + "."))
    }
    return records.digest(state)


def save(net: MultiDomainNetwork, domain: Domain, folder: Path, dtype: torch.dtype) -> Path:
    """Write a domain's two files into a folder; the same domain gives the same bytes."""
    record, tensors = packed(net, domain, dtype)
    try:
        records.write(folder / RECORD, FORMAT, record, tensors)
    except CovNormError as error:
        raise CovNormError(f"domain {domain.name!r}: {error}") from error
    return folder


def load(net: MultiDomainNetwork, folder: Path, name: str | None, own: nn.Module | None) -> Domain:
    """A domain, made beside the network from the files in a folder."""
    file = folder / RECORD
    record = records.read(file, FORMAT)
    with records.blame(file):
        check_record(record, net, own)
    tensors = records.read_tensors(file, record)
    return unpacked(net, record, tensors, name, own, file, records.tensor_file(file, record))


def packed(
    net: MultiDomainNetwork, domain: Domain, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A domain as plain JSON and tensors by name; `unpacked` is the way back.

    In float16 a tensor that would overflow there keeps float32. In int8 matrices are whole numbers
    with a scale a row (`rows_as_int8`), and all else is float16. Statistics of norms that are the
    backbone's own (``Training(norms="frozen")``) are not stored but taken from it again.
    """
    if dtype not in STORED:
        raise CovNormError(f"dtype={dtype}: domains are stored as float32, float16 or int8")
    state, frozen = _without_statistics(net, domain.stored())
    tensors = _stored(state, dtype)
    basis = None if domain.basis is None else net.basis(domain.basis)
    record = {
        "name": domain.name,
        "classes": None if domain.classes is None else list(domain.classes),
        "preprocessing": domain.preprocessing,
        "backbone": {"class": type(net.backbone).__name__, "fingerprint": net.fingerprint},
        "sites": {
            name: {"shape": [site.d_out, site.d_in], "adapter": domain.adapters[name].config()}
            for name, site in net.sites.items()
        },
        "weights": {name: weight.kind for name, weight in domain.weights.items()},
        "basis": basis and {"name": basis.name, "fingerprint": basis.fingerprint},
        "own": domain.own is not None,
        "statistics": "backbone" if frozen else "own",
    }
    return record, tensors


def _without_statistics(
    net: MultiDomainNetwork, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], bool]:
    """The state without the norms' statistics, if all of them are the backbone's to the bit."""
    whole = net.backbone.state_dict()
    found = {k for k in state if _is_statistic(k)}
    for key in found:
        _, name, rest = key.split(".", 2)
        theirs = whole.get(f"{name.replace('/', '.')}.{rest}")
        if theirs is None or not torch.equal(state[key].cpu(), theirs.cpu()):
            return state, False
    return {k: v for k, v in state.items() if k not in found}, bool(found)


def _is_statistic(key: str) -> bool:
    return key.startswith("norms.") and key.endswith(STATISTICS)


def check_record(record: dict[str, Any], net: MultiDomainNetwork, own: nn.Module | None) -> None:
    """Refuse a record of another network, before its tensors are read."""
    _check_backbone(record, net)
    _basis(record.get("basis"), net)
    if record["own"] != (own is not None):
        word = "with" if record["own"] else "without"
        raise CovNormError(f"the domain was saved {word} an own module: pass the same as own=")


def unpacked(
    net: MultiDomainNetwork,
    record: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str | None,
    own: nn.Module | None,
    file: Path,
    tensor_file: Path,
) -> Domain:
    """A domain, made beside the network; the two files are named in what is wrong with them."""
    with records.blame(tensor_file):
        tensors = from_int8(tensors)
    with records.blame(file):
        basis = _basis(record.get("basis"), net)
        _check_classes(record["classes"], tensors.get("head.weight"), tensor_file)
        adapters = {}
        for site in net.sites.values():
            config = record["sites"][site.name]["adapter"]
            shared = basis.factors[site.name] if basis is not None else None
            adapters[site.name] = build(
                config, site.spatial, site.d_in, site.d_out, site.name, shared
            )
        weights = _weights(record.get("weights", {}), net)
        if weights and not all(a.idle for a in adapters.values()):
            raise CovNormError("has adapters behind layers whose weights it replaces")
        name = check_name(record["name"]) if name is None else name
        domain = net.make_domain(
            name, adapters, record["classes"], own, record["preprocessing"], weights
        )
        domain.basis = None if basis is None else basis.name
    with records.blame(tensor_file):
        _fill_(domain, tensors, record.get("statistics") == "backbone")
    return domain


def _weights(kinds: dict[str, str], net: MultiDomainNetwork) -> dict[str, WeightAdapter]:
    """Empty weights of a domain's own for the layers of the backbone: all of them, or none."""
    if not kinds:
        return {}
    kind = next(iter(kinds.values()))
    with_head = net.head_name in kinds and kind == "own"  # a fork of lwf
    layers = weight_layers(net.backbone, kind, None if with_head else net.head_name)
    if set(kinds) != set(layers) or set(kinds.values()) != {kind}:
        differ = sorted(set(kinds) ^ set(layers)) or sorted(set(kinds.values()))
        raise CovNormError(f"has weights for other layers or kinds: {', '.join(differ[:4])}")
    return own_weights(kind, layers, packed=True)


def _basis(wanted: dict[str, str] | None, net: MultiDomainNetwork) -> Basis | None:
    if wanted is None:
        return None
    for _, basis in net.bases.items():
        if basis.fingerprint == wanted["fingerprint"]:
            return basis
    shares = f"shares the basis {wanted['name']!r} ({wanted['fingerprint'][:12]})"
    if wanted["name"] in net.bases:
        raise CovNormError(
            f"{shares}, and this network has another one of that name, as it was before or will "
            "be: load both into a new network"
        )
    raise CovNormError(f"{shares}, which this network does not have: net.load_basis it first")


def _stored(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors as a file has them, by name."""
    small = torch.float16 if dtype == torch.int8 else dtype
    out = {}
    for name, tensor in sorted(state.items()):
        matrix = tensor.is_floating_point() and tensor.ndim >= 2 and tensor.numel() > 0
        if dtype == torch.int8 and matrix:
            whole = _rounded(name, tensor, torch.float32)
            out[name], out[name + SCALE] = rows_as_int8(whole)
        else:
            out[name] = _rounded(name, tensor, small)
    return dict(sorted(out.items()))


def rows_as_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A float matrix (n, …) as int8 and a scale (n,) a row: ``row ≈ scale · whole numbers``."""
    scale = matrix.flatten(1).abs().amax(1) / 127
    safe = scale.clamp(min=torch.finfo(torch.float32).tiny)
    whole = (matrix / safe.reshape(-1, *[1] * (matrix.ndim - 1))).round().clamp(-127, 127)
    return whole.to(torch.int8), scale


def from_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `rows_as_int8` for every matrix that has a scale beside it."""
    out = {k: v for k, v in tensors.items() if not k.endswith(SCALE)}
    for key, scale in tensors.items():
        name = key.removesuffix(SCALE)
        if name == key:
            continue
        whole = tensors.get(name)
        if whole is None or whole.dtype != torch.int8 or scale.dtype != torch.float32:
            raise CovNormError(f"tensor {key!r} is the scale of no int8 matrix")
        if scale.shape != whole.shape[:1] or not scale.isfinite().all() or (scale < 0).any():
            raise CovNormError(f"tensor {key!r} is no scale of {tuple(whole.shape)}")
        out[name] = whole.float() * scale.reshape(-1, *[1] * (whole.ndim - 1))
    return out


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu().contiguous().clone()  # tied weights are stored twice
    if not tensor.is_floating_point():
        return tensor
    tensor = tensor.float()
    if not tensor.isfinite().all():
        raise CovNormError(f"tensor {name!r} holds NaN or Inf: not saved; train the domain anew")
    small = tensor.to(dtype)
    return small if small.isfinite().all() else tensor


def _check_classes(classes: object, head: Tensor | None, tensor_file: Path) -> None:
    """Before anything is built to their number."""
    if classes is None:
        return
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise CovNormError("classes are no list of names")
    if head is not None and len(head) != len(classes):
        raise CovNormError(f"{len(classes)} classes, but a head of {len(head)} in {tensor_file}")


def _check_backbone(record: dict[str, Any], net: MultiDomainNetwork) -> None:
    backbone = record["backbone"]
    if backbone["fingerprint"] != net.fingerprint:
        raise CovNormError(
            f"was made for another backbone ({backbone['class']} {backbone['fingerprint'][:12]}), "
            f"this one is {type(net.backbone).__name__} {net.fingerprint[:12]}"
        )
    if set(record["sites"]) != set(net.sites):
        differ = sorted(set(record["sites"]) ^ set(net.sites))
        raise CovNormError(f"has other sites than this network ({', '.join(differ[:4])}): sites=")
    for name, site in net.sites.items():
        if record["sites"][name]["shape"] != [site.d_out, site.d_in]:
            raise CovNormError(
                f"site {name!r} has shape {record['sites'][name]['shape']}, "
                f"the network has {[site.d_out, site.d_in]}"
            )


def _fill_(domain: Domain, tensors: dict[str, Tensor], frozen: bool) -> None:
    """Check and take over all tensors; `frozen`: the norms' statistics are the backbone's."""
    own = domain.state_dict()
    own = {k: v for k, v in own.items() if not (frozen and _is_statistic(k))}
    if set(own) != set(tensors):
        differ = sorted(set(own) ^ set(tensors))
        raise CovNormError(f"has other tensors than the domain needs: {', '.join(differ[:4])}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise CovNormError(
                f"tensor {name!r} is {tuple(tensor.shape)}, needs {tuple(own[name].shape)}"
            )
        allowed = DTYPES if own[name].is_floating_point() else (own[name].dtype,)
        if tensor.dtype not in allowed:
            raise CovNormError(f"tensor {name!r} is {tensor.dtype}, needs one of {allowed}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CovNormError(f"tensor {name!r} holds NaN or Inf")
        if name.endswith("running_var") and (tensor < 0).any():
            raise CovNormError(f"tensor {name!r} holds a negative variance")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
