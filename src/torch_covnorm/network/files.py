"""A domain as files: tensors in safetensors, the rest in JSON, nothing pickled.

Everything is checked before the network changes: checksums, format, the backbone's fingerprint,
sites, shapes, dtypes and finiteness.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import records
from ..adapters import WeightAdapter, build, weight_adapters
from ..errors import CovNormError
from .basis import Basis
from .domain import Domain, Network, check_name
from .fresh import make_domain
from .modulemap import ModuleMap
from .sites import NORMS, copied_norms, find_norms

FORMAT = "torch-covnorm domain"
RECORD = "domain.json"
SCALE = "#scale"  # suffix of the scales of an int8 matrix; no module's name contains "#"
LOADED = (torch.float32, torch.float16)  # dtypes of floats in a file, int8 with its scales apart
LARGEST_ERROR = 0.02  # of an int8 matrix, relative to its norm; above it, float16 is used
STATISTICS = ("num_batches_tracked", "running_mean", "running_var")


def fingerprint(backbone: nn.Module, head: str | None) -> str:
    """Return SHA-256 of the backbone's weights and statistics by name, without the head."""
    state = {
        name: tensor
        for name, tensor in backbone.state_dict().items()
        if isinstance(tensor, Tensor)
        and not name.endswith("num_batches_tracked")
        and not (head and name.startswith(head + "."))
    }
    return records.digest(state)


def save(net: Network, domain: Domain, folder: Path, dtype: torch.dtype) -> Path:
    """Write a domain's two files into a folder. Equal domains give equal bytes."""
    record, tensors = packed(net, domain, dtype)
    try:
        records.write(folder / RECORD, FORMAT, record, tensors)
    except CovNormError as error:
        raise CovNormError(f"domain {domain.name!r}: {error}") from error
    return folder


def load(net: Network, folder: Path, name: str | None, own: nn.Module | None) -> Domain:
    """Read and check a domain from a folder. The network does not change."""
    file = folder / RECORD
    record = records.read(file, FORMAT)
    with records.blame(file):
        check_record(record, net, own)
    tensors = records.read_tensors(file, record)
    return unpacked(net, record, tensors, name, own, file, records.tensor_file(file, record))


def packed(
    net: Network, domain: Domain, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a domain as plain JSON and tensors by name. `unpacked` does the reverse.

    With float16, a tensor that would overflow stays float32. With int8, matrices are whole numbers
    with one scale per row (`rows_as_int8`), and everything else is float16, as are matrices that
    would lose more than 2 % of their norm. Running statistics that equal the backbone's are not
    stored; they are taken from it again.
    """
    if dtype not in (*LOADED, torch.int8):
        raise CovNormError(f"dtype={dtype}: domains are stored as float32, float16 or int8")
    state = domain.stored()
    statistics = {k for k in state if _is_statistic(k)}
    originals = {n: norm for n, norm in find_norms(net.backbone).items() if n in domain.norms}
    norms = ModuleMap(originals).state_dict(prefix="norms.")
    equal = [torch.equal(state[k].cpu(), norms[k].cpu()) for k in statistics]
    shared = bool(equal) and all(equal)
    if shared:
        state = {k: v for k, v in state.items() if k not in statistics}
    if domain.basis is not None and domain.basis not in net.bases:
        raise CovNormError(
            f"domain {domain.name!r}: its basis {domain.basis!r} is not in this network: load it "
            "with net.load_basis"
        )
    basis = None if domain.basis is None else net.bases[domain.basis]
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
        "norms": _which_norms(net, domain),
        "statistics": "backbone" if shared else "own",
    }
    return record, _in_dtype(state, dtype)


def _which_norms(net: Network, domain: Domain) -> str:
    """Return "shared", "sites" or "own": which norms of the backbone the domain has copies of."""
    for which in NORMS:
        if set(copied_norms(net.backbone, net.sites, which)) == set(domain.norms):
            return which
    raise CovNormError(f"domain {domain.name!r} has lost some of its norms, so it was not saved")


def _is_statistic(key: str) -> bool:
    return key.startswith("norms.") and key.endswith(STATISTICS)


def check_record(record: dict[str, Any], net: Network, own: nn.Module | None) -> None:
    """Refuse a record that does not fit the network, before its tensors are read."""
    backbone = record["backbone"]
    if backbone["fingerprint"] != net.fingerprint:
        raise CovNormError(
            f"was made for another backbone ({backbone['class']} {backbone['fingerprint'][:12]}); "
            f"this network has {type(net.backbone).__name__} {net.fingerprint[:12]}"
        )
    if differ := sorted(set(record["sites"]) ^ set(net.sites)):
        raise CovNormError(
            f"has other sites than this network ({', '.join(differ[:4])}): build the network with "
            "the same sites="
        )
    for name, site in net.sites.items():
        shape, wanted = record["sites"][name]["shape"], [site.d_out, site.d_in]
        if shape != wanted:
            raise CovNormError(f"site {name!r} has shape {shape}, but the network has {wanted}")
    _find_basis(record.get("basis"), net)
    if record["own"] != (own is not None):
        word = "with" if record["own"] else "without"
        raise CovNormError(f"the domain was saved {word} an own module: pass the same as own=")


def unpacked(
    net: Network,
    record: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str | None,
    own: nn.Module | None,
    file: Path,
    tensor_file: Path,
) -> Domain:
    """Return a domain from its record and tensors. The network does not change.

    Errors name `file` or `tensor_file`, wherever the fault is.
    """
    with records.blame(tensor_file):
        tensors = from_int8(tensors)
    with records.blame(file):
        basis = _find_basis(record.get("basis"), net)
        _check_classes(record["classes"], tensors.get("head.weight"), tensor_file)
        adapters = {}
        for site_name, site in net.sites.items():
            shared = None if basis is None else basis.factors[site_name]
            adapters[site_name] = build(record["sites"][site_name]["adapter"], site, shared)
        weights = _build_weights(record.get("weights", {}), net)
        if weights and not all(a.idle for a in adapters.values()):
            raise CovNormError("has adapters at layers whose weights it replaces")
        name = check_name(record["name"]) if name is None else name
        classes, preprocessing = record["classes"], record["preprocessing"]
        norms = record.get("norms", "own")  # the first files have no such key
        domain = make_domain(net, name, adapters, classes, own, preprocessing, weights, norms)
        domain.basis = None if basis is None else basis.name
    with records.blame(tensor_file):
        _fill_(domain, tensors, record.get("statistics") == "backbone")
    return domain


def _build_weights(kinds: dict[str, str], net: Network) -> dict[str, WeightAdapter]:
    """Return new weight adapters for all layers of the backbone, or none."""
    if not kinds:
        return {}
    kind = next(iter(kinds.values()))
    with_head = net.head_name in kinds and kind == "own"  # a fork made by lwf
    head = None if with_head else net.head_name
    weights = weight_adapters(net.backbone, kind, head, packed=True)
    if set(kinds) != set(weights) or set(kinds.values()) != {kind}:
        differ = sorted(set(kinds) ^ set(weights)) or sorted(set(kinds.values()))
        raise CovNormError(f"has weights for other layers or kinds: {', '.join(differ[:4])}")
    return weights


def _find_basis(wanted: dict[str, str] | None, net: Network) -> Basis | None:
    if wanted is None:
        return None
    for basis in net.bases.values():
        if basis.fingerprint == wanted["fingerprint"]:
            return basis
    shares = f"shares the basis {wanted['name']!r} ({wanted['fingerprint'][:12]})"
    if wanted["name"] in net.bases:
        raise CovNormError(
            f"{shares}, but this network has another version of it: load both the basis and the "
            "domain into a new network"
        )
    raise CovNormError(f"{shares}, which this network does not have: call net.load_basis first")


def _in_dtype(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors as a file of this dtype holds them, by name."""
    out = {}
    for name, tensor in state.items():
        whole = tensor.detach().cpu().contiguous().clone()  # tied weights are stored twice
        if whole.is_floating_point():
            whole = whole.float()
            if not whole.isfinite().all():
                raise CovNormError(
                    f"tensor {name!r} contains NaN or Inf, so the domain was not saved: retrain it"
                )
            if dtype == torch.int8 and _fits_int8(whole):
                whole, out[name + SCALE] = rows_as_int8(whole)
            else:
                small = whole.to(torch.float16 if dtype == torch.int8 else dtype)
                whole = small if small.isfinite().all() else whole
        out[name] = whole
    return dict(sorted(out.items()))


def _fits_int8(matrix: Tensor) -> bool:
    """Return whether rounding the rows to int8 loses at most 2 % of the matrix's norm.

    About 1 % is usual. Rows with a few very large numbers lose the small ones.
    """
    if matrix.ndim < 2 or matrix.numel() == 0:
        return False
    whole, scale = rows_as_int8(matrix)
    rounded = whole.float() * scale.reshape(-1, *[1] * (matrix.ndim - 1))
    return bool((rounded - matrix).norm() <= LARGEST_ERROR * matrix.norm())


def rows_as_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a float matrix (n, …) as int8 and a scale (n,): ``row ≈ scale · whole numbers``."""
    scale = matrix.flatten(1).abs().amax(1) / 127
    safe = scale.clamp(min=torch.finfo(torch.float32).tiny)
    whole = (matrix / safe.reshape(-1, *[1] * (matrix.ndim - 1))).round().clamp(-127, 127)
    return whole.to(torch.int8), scale


def from_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `rows_as_int8` for every matrix that has a scale."""
    out = {k: v for k, v in tensors.items() if not k.endswith(SCALE)}
    for key, scale in tensors.items():
        name = key.removesuffix(SCALE)
        if name == key:
            continue
        whole = tensors.get(name)
        if whole is None or whole.dtype != torch.int8 or scale.dtype != torch.float32:
            raise CovNormError(f"tensor {key!r} must be the float32 scale of an int8 matrix")
        if scale.shape != whole.shape[:1] or not scale.isfinite().all() or (scale < 0).any():
            raise CovNormError(
                f"tensor {key!r} must be one finite scale ≥ 0 per row of {tuple(whole.shape)}"
            )
        out[name] = whole.float() * scale.reshape(-1, *[1] * (whole.ndim - 1))
    return out


def _check_classes(classes: object, head: Tensor | None, tensor_file: Path) -> None:
    """Check the classes before anything of that size is built."""
    if classes is None:
        return
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise CovNormError("classes must be a list of names")
    if head is not None and len(head) != len(classes):
        raise CovNormError(
            f"{len(classes)} classes, but the head in {tensor_file} has {len(head)} outputs"
        )


def _fill_(domain: Domain, tensors: dict[str, Tensor], shared: bool) -> None:
    """Check and copy all tensors. `shared`: running statistics are the backbone's, not stored."""
    state = {k: v for k, v in domain.state_dict().items() if not (shared and _is_statistic(k))}
    if differ := sorted(set(state) ^ set(tensors)):
        raise CovNormError(f"has other tensors than the domain needs: {', '.join(differ[:4])}")
    for name, tensor in tensors.items():
        wanted = state[name]
        if tensor.shape != wanted.shape:
            raise CovNormError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, needs {tuple(wanted.shape)}"
            )
        allowed = LOADED if wanted.is_floating_point() else (wanted.dtype,)
        if tensor.dtype not in allowed:
            raise CovNormError(f"tensor {name!r} has dtype {tensor.dtype}, needs one of {allowed}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CovNormError(f"tensor {name!r} contains NaN or Inf")
        if name.endswith("running_var") and (tensor < 0).any():
            raise CovNormError(f"tensor {name!r} contains a negative variance")
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
