"""A record on disk: JSON with a checksum, and the one safetensors file that it names by content.

The JSON is replaced last, so a reader finds the old record or the new one, whatever happens in
between. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .errors import CovNormError
from .version import __version__

VERSION = 1
TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
TEMPORARY = re.compile(r"\.(tensors-[0-9a-f]{16}\.safetensors|\w+\.json)\.[0-9a-f]{16}")


def write(file: Path, format_: str, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a record's two files; the same record gives the same bytes."""
    folder = file.parent
    blob = safetensors.torch.save(tensors)
    digest = hashlib.sha256(blob).hexdigest()
    record = {**record, "tensors": {"file": f"tensors-{digest[:16]}.safetensors", "sha256": digest}}
    text = sealed(format_, record)
    with blame(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path, data in ((folder / record["tensors"]["file"], blob), (file, text)):
        with blame(path):
            write_file(path, data)
    _clear(folder)


def _clear(folder: Path) -> None:
    """Of earlier writes, killed ones among them, what no record names any more."""
    there = list(folder.iterdir())
    with blame(folder):
        records = [f.read_text(errors="replace") for f in there if f.suffix == ".json"]
    named = {name for text in records for name in TENSORS.findall(text)}
    for old in there:
        left = TENSORS.fullmatch(old.name) or TEMPORARY.fullmatch(old.name)
        if left and old.name not in named:
            old.unlink(missing_ok=True)


def read(file: Path, format_: str) -> dict[str, Any]:
    """The JSON part, whole and of this format."""
    with blame(file):
        return unsealed(file.read_bytes(), format_)


def sealed(format_: str, record: dict[str, Any], indent: int | None = 1) -> bytes:
    """A record as JSON with its format and checksum; what would not come back the same is refused.

    `indent` is for human eyes; without it a large record is written several times faster.
    """
    versions = {"torch": torch.__version__, "torch_covnorm": __version__}
    record = {"format": format_, "version": VERSION, **record, "versions": versions}
    try:
        text = json.dumps(
            {**record, "checksum": checksum(record)},
            indent=indent,
            ensure_ascii=False,
            allow_nan=False,
        )
        same = {k: v for k, v in json.loads(text).items() if k != "checksum"} == record
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CovNormError(f"does not fit into JSON: {error}") from None
    if not same:
        raise CovNormError("must be plain JSON: lists, strings as keys, no tuples")
    return data


def unsealed(data: bytes, format_: str) -> dict[str, Any]:
    """What `sealed` was given, checked."""
    record = json.loads(data)
    if not isinstance(record, dict) or record.get("format") != format_:
        raise CovNormError(f"is no {format_}")
    if record.get("version") != VERSION:
        raise CovNormError(
            f"has version {record.get('version')}, this software reads {VERSION}: update it"
        )
    if record.pop("checksum", None) != checksum(record):
        raise CovNormError("is damaged (its checksum differs): restore it from a copy")
    return record


def tensor_file(file: Path, record: dict[str, Any]) -> Path:
    """The tensor file of a record: a plain file name beside it, never a path."""
    with blame(file):
        name = record["tensors"]["file"]
        if not isinstance(name, str) or Path(name).name != name:
            raise CovNormError(f"tensor file {name!r} is no plain .safetensors name")
        if not name.endswith(".safetensors"):
            raise CovNormError(f"tensor file {name!r} is no plain .safetensors name")
    return file.parent / name


def read_tensors(file: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a record by name, as their checksum says."""
    path = tensor_file(file, record)
    with blame(path):
        # A length, a JSON header of names, dtypes and offsets, and raw numbers: this format has no
        # code to run, unlike torch.load's pickles; what it does not check, its callers do.
        return safetensors.torch.load(read_whole(path, record["tensors"]["sha256"]))


def read_whole(file: Path, sha256: str) -> bytes:
    """The bytes of a file, as their checksum says."""
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CovNormError("is damaged (its checksum differs): restore it from a copy")
    return data


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name: their dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def checksum(record: dict[str, Any]) -> str:
    """SHA-256 of a record's content, whatever the order of its keys."""
    canonical = json.dumps(record, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


@contextlib.contextmanager
def blame(file: Path) -> Iterator[None]:
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


def write_file(file: Path, data: bytes) -> None:
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
