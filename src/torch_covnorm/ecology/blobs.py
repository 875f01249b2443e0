"""Files that are named by their content and never change: ``sha256.json``, ``sha256.safetensors``.

A blob that the manifest does not name is garbage, left by a killed process or a removed domain.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ..errors import CovNormError
from ..records import blame, read_whole, sealed, unsealed, write_file

BLOB = re.compile(r"([0-9a-f]{64})\.(json|safetensors)")
TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.(json|safetensors)\.[0-9a-f]{16}")


class Blobs:
    """The blobs of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, blob: str) -> Path:
        """Return the path of a blob; refuse any other name, so that none can lead elsewhere."""
        if not isinstance(blob, str) or not BLOB.fullmatch(blob):
            raise CovNormError(f"{self.folder}: {blob!r} is not the name of a blob")
        return self.folder / blob

    def write(self, data: bytes, ending: str) -> str:
        """Store bytes and return their blob name. A damaged file of that name is replaced."""
        blob = f"{hashlib.sha256(data).hexdigest()}.{ending}"
        file = self.path(blob)
        with blame(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if file.read_bytes() == data:
                    return blob
            write_file(file, data)
        return blob

    def write_record(self, format_: str, record: dict[str, Any]) -> str:
        """Store plain JSON and return its blob name."""
        return self.write(sealed(format_, record), "json")

    def write_tensors(self, tensors: dict[str, Tensor]) -> str:
        """Store named tensors and return their blob name."""
        return self.write(safetensors.torch.save(tensors), "safetensors")

    def read(self, blob: str) -> bytes:
        """Return the bytes of a blob, checked against its name."""
        file = self.path(blob)
        with blame(file):
            return read_whole(file, file.stem)

    def read_record(self, blob: str, format_: str) -> dict[str, Any]:
        """Return what `write_record` was given."""
        data = self.read(blob)
        with blame(self.path(blob)):
            return unsealed(data, format_)

    def read_tensors(self, blob: str) -> dict[str, Tensor]:
        """Return what `write_tensors` was given."""
        data = self.read(blob)
        with blame(self.path(blob)):
            # safetensors holds names, dtypes, offsets and raw numbers: there is no code to run.
            return safetensors.torch.load(data)

    def size(self, blob: str) -> int:
        """Return the number of bytes of a blob."""
        with blame(self.path(blob)):
            return self.path(blob).stat().st_size

    def names(self) -> set[str]:
        """Return the names of all blobs in the folder."""
        return {file.name for file in self._files() if BLOB.fullmatch(file.name)}

    def sweep(self, kept: Container[str]) -> None:
        """Remove the blobs that are not in `kept`, and leave files that are not blobs alone.

        What cannot be removed now is harmless, and a later change removes it.
        """
        with contextlib.suppress(OSError):
            for file in list(self._files()):
                unused = BLOB.fullmatch(file.name) and file.name not in kept
                if unused or TEMPORARY.fullmatch(file.name):
                    file.unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from self.folder.iterdir()
