"""A domain as files: tensors in safetensors, the rest in JSON, nothing pickled.

``domain.json`` names the tensor file by its content and is replaced last, so a reader finds the
old domain or the new one. Everything is checked before the network changes: checksums, format,
the backbone's fingerprint, sites, shapes, dtypes, finiteness.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from .adapters import build
from .domain import Domain, check_name
from .errors import CovNormError
from .version import __version__

if TYPE_CHECKING:
    from .network import MultiDomainNetwork

FORMAT = "torch-covnorm domain"
VERSION = 1
RECORD = "domain.json"
TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
DTYPES = (torch.float32, torch.float16)


def fingerprint(backbone: nn.Module, head: str | None) -> str:
    """SHA-256 of the backbone's weights and statistics, by name; without the replaced head."""
    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.state_dict().items()):
        replaced = head and name.startswith(head + ".")
        if name.endswith("num_batches_tracked") or replaced or not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(net: MultiDomainNetwork, domain: Domain, folder: Path, dtype: torch.dtype) -> Path:
    """Write a domain's two files into a folder; the same domain gives the same bytes.

    In float16 a tensor that would overflow there keeps float32.
    """
    if dtype not in DTYPES:
        raise CovNormError(f"dtype={dtype}: domains are stored as float32 or float16")
    tensors = {k: _stored(k, v, dtype) for k, v in sorted(domain.state_dict().items())}
    blob = safetensors.torch.save(tensors)
    digest = hashlib.sha256(blob).hexdigest()
    record = {
        "format": FORMAT,
        "version": VERSION,
        "name": domain.name,
        "classes": None if domain.classes is None else list(domain.classes),
        "preprocessing": domain.preprocessing,
        "backbone": {"class": type(net.backbone).__name__, "fingerprint": net.fingerprint},
        "sites": {
            name: {"shape": [site.d_out, site.d_in], "adapter": domain.adapters[name].config()}
            for name, site in net.sites.items()
        },
        "own": domain.own is not None,
        "tensors": {"file": f"tensors-{digest[:16]}.safetensors", "sha256": digest},
        "versions": {"torch": torch.__version__, "torch_covnorm": __version__},
    }
    text = _sealed(record, domain.name)
    with _blame(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for file, data in ((folder / record["tensors"]["file"], blob), (folder / RECORD, text)):
        with _blame(file):
            _write(file, data)
    for old in folder.iterdir():  # of earlier saves, a failed one among them
        if TENSORS.fullmatch(old.name) and old.name != record["tensors"]["file"]:
            old.unlink(missing_ok=True)
    return folder


def load(net: MultiDomainNetwork, folder: Path, name: str | None, own: nn.Module | None) -> Domain:
    """A domain, made beside the network from the files in a folder."""
    record_file = folder / RECORD
    record = _read_record(record_file)
    with _blame(record_file):
        _check_backbone(record, net)
        if record["own"] != (own is not None):
            word = "with" if record["own"] else "without"
            raise CovNormError(f"the domain was saved {word} an own module: pass the same as own=")
        tensor_file = folder / check_tensor_name(record["tensors"]["file"])
    with _blame(tensor_file):
        tensors = _read_tensors(tensor_file, record["tensors"]["sha256"])
    with _blame(record_file):
        _check_classes(record["classes"], tensors.get("head.weight"), tensor_file)
        adapters = {}
        for site in net.sites.values():
            config = record["sites"][site.name]["adapter"]
            adapters[site.name] = build(config, site.spatial, site.d_in, site.d_out, site.name)
        name = check_name(record["name"]) if name is None else name
        domain = net.make_domain(name, adapters, record["classes"], own, record["preprocessing"])
    with _blame(tensor_file):
        _fill_(domain, tensors)
    return domain


def check_tensor_name(name: object) -> str:
    """A plain file name beside the record; never a path."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise CovNormError(f"tensor file {name!r} is no plain .safetensors name")
    return name


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu().contiguous().clone()  # tied weights are stored twice
    if not tensor.is_floating_point():
        return tensor
    tensor = tensor.float()
    if not tensor.isfinite().all():
        raise CovNormError(f"tensor {name!r} holds NaN or Inf: not saved; train the domain anew")
    small = tensor.to(dtype)
    return small if small.isfinite().all() else tensor


def _sealed(record: dict[str, Any], name: str) -> bytes:
    """The record as JSON with its checksum; what would not come back the same is refused."""
    try:
        text = json.dumps(
            {**record, "checksum": _checksum(record)}, indent=1, ensure_ascii=False, allow_nan=False
        ).encode()
        same = {k: v for k, v in json.loads(text).items() if k != "checksum"} == record
    except (TypeError, ValueError, RecursionError) as error:
        raise CovNormError(f"domain {name!r} does not fit into JSON: {error}") from None
    if not same:
        raise CovNormError(
            f"domain {name!r}: preprocessing must be plain JSON: lists, strings as keys, no tuples"
        )
    return text


def _check_classes(classes: object, head: Tensor | None, tensor_file: Path) -> None:
    """Before anything is built to their number."""
    if classes is None:
        return
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise CovNormError("classes are no list of names")
    if head is not None and len(head) != len(classes):
        raise CovNormError(f"{len(classes)} classes, but a head of {len(head)} in {tensor_file}")


def _read_record(file: Path) -> dict[str, Any]:
    with _blame(file):
        record = json.loads(file.read_bytes())
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise CovNormError("is no torch-covnorm domain")
        if record.get("version") != VERSION:
            raise CovNormError(
                f"has version {record.get('version')}, this software reads {VERSION}: update it"
            )
        if record.pop("checksum", None) != _checksum(record):
            raise CovNormError("is damaged (its checksum differs): restore it from a copy")
    return record


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


def _read_tensors(file: Path, sha256: str) -> dict[str, Tensor]:
    blob = file.read_bytes()
    if hashlib.sha256(blob).hexdigest() != sha256:
        raise CovNormError("is damaged (its checksum differs): restore it from a copy")
    return safetensors.torch.load(blob)  # tensors and their names alone; nothing is unpickled


def _fill_(domain: Domain, tensors: dict[str, Tensor]) -> None:
    own = domain.state_dict()
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


def _checksum(record: dict[str, Any]) -> str:
    canonical = json.dumps(record, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


@contextlib.contextmanager
def _blame(file: Path) -> Iterator[None]:
    """Errors inside are this file's fault and name it."""
    try:
        yield
    except CovNormError as error:
        raise CovNormError(f"{file}: {error}") from None
    except OSError as error:
        raise CovNormError(f"{file}: {error.strerror or error}") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CovNormError(f"{file}: is incomplete or malformed ({error!r})") from error
    except (ValueError, safetensors.SafetensorError) as error:
        raise CovNormError(f"{file}: is damaged ({error}): restore it from a copy") from error


def _write(file: Path, data: bytes) -> None:
    """All of the file or nothing: a temporary neighbour, fsync, rename, fsync of the folder."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
