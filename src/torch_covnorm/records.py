"""A record on disk: JSON with a checksum, and a safetensors file named by its content.

The JSON is replaced last, so a reader sees either the old record or the new one, whatever happens
in between. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
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
    """Write the two files of a record. Equal records give equal bytes."""
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
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    """Remove files of earlier or interrupted writes that no record names any more."""
    files = list(folder.iterdir())
    with blame(folder):
        records = [f.read_text(errors="replace") for f in files if f.suffix == ".json"]
    named = {name for text in records for name in TENSORS.findall(text)}
    for file in files:
        ours = TENSORS.fullmatch(file.name) or TEMPORARY.fullmatch(file.name)
        if ours and file.name not in named:
            file.unlink(missing_ok=True)


def read(file: Path, format_: str) -> dict[str, Any]:
    """Return the checked JSON part of a record of this format."""
    with blame(file):
        return unsealed(file.read_bytes(), format_)


def sealed(format_: str, record: dict[str, Any], indent: int | None = 1) -> bytes:
    """Return a record as JSON with its format and checksum.

    Values that would not come back equal are refused. indent=None writes large records several
    times faster.
    """
    versions = {"torch": torch.__version__, "torch_covnorm": __version__}
    record = {"format": format_, "version": VERSION, **record, "versions": versions}
    try:
        whole = {**record, "checksum": checksum(record)}
        text = json.dumps(whole, indent=indent, ensure_ascii=False, allow_nan=False)
        same, data = json.loads(text) == whole, text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CovNormError(f"cannot be written as JSON: {error}") from None
    if not same:
        raise CovNormError("must be plain JSON: use lists instead of tuples, and strings as keys")
    return data


def unsealed(data: bytes, format_: str) -> dict[str, Any]:
    """Return the record from what `sealed` returned, after checking it."""
    record = json.loads(data)
    if not isinstance(record, dict) or record.get("format") != format_:
        raise CovNormError(f"is not a {format_}")
    if record.get("version") != VERSION:
        raise CovNormError(
            f"has format version {record.get('version')}, but this torch-covnorm reads version "
            f"{VERSION}: update torch-covnorm"
        )
    if record.pop("checksum", None) != checksum(record):
        raise CovNormError("is damaged (its checksum differs): restore it from a copy")
    return record


def tensor_file(file: Path, record: dict[str, Any]) -> Path:
    """Return the tensor file of a record. It is in the same folder: a file name, never a path."""
    with blame(file):
        name = record["tensors"]["file"]
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise CovNormError(f"tensor file {name!r} must be a plain file name in .safetensors")
    return file.parent / name


def read_tensors(file: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a record by name, after checking their checksum."""
    path = tensor_file(file, record)
    with blame(path):
        # The format holds a JSON header and raw numbers, but no code, unlike torch.load's pickles.
        return safetensors.torch.load(read_whole(path, record["tensors"]["sha256"]))


def read_whole(file: Path, sha256: str) -> bytes:
    """Return the bytes of a file, after checking their checksum."""
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CovNormError("is damaged (its checksum differs): restore it from a copy")
    return data


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return SHA-256 of tensors: names, dtypes, shapes and bytes."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha256.update(flat.view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def checksum(record: dict[str, Any]) -> str:
    """Return SHA-256 of a record's content, independent of the order of its keys."""
    canonical = json.dumps(record, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def disk_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of files; folders, and files that are removed meanwhile, count nothing."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


@contextlib.contextmanager
def blame(file: Path) -> Iterator[None]:
    """Turn errors inside into a CovNormError that names this file."""
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
    """Write a file atomically: temporary file, fsync, rename, fsync of the folder."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
