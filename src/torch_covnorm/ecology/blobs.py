"""Files that are named by their content and never change: ``sha256.json``, ``sha256.safetensors``.

What a manifest does not name is garbage: of a process that was killed, or of a domain that is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Container, Iterator
from pathlib import Path

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
        """Where a blob is; a name that is none is refused, so it cannot lead elsewhere."""
        if not isinstance(blob, str) or not BLOB.fullmatch(blob):
            raise CovNormError(f"{self.folder}: {blob!r} is no name of a blob")
        return self.folder / blob

    def write(self, data: bytes, ending: str) -> str:
        """Keep these bytes; returns their name. A damaged file of that name is replaced."""
        blob = f"{hashlib.sha256(data).hexdigest()}.{ending}"
        file = self.path(blob)
        with blame(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if file.read_bytes() == data:
                    return blob
            write_file(file, data)
        return blob

    def write_record(self, format_: str, record: dict) -> str:
        """Keep plain JSON."""
        return self.write(sealed(format_, record), "json")

    def write_tensors(self, tensors: dict[str, Tensor]) -> str:
        """Keep tensors by name."""
        return self.write(safetensors.torch.save(tensors), "safetensors")

    def read(self, blob: str) -> bytes:
        """The bytes of a blob, as its name says."""
        file = self.path(blob)
        with blame(file):
            return read_whole(file, file.stem)

    def read_record(self, blob: str, format_: str) -> dict:
        """What `write_record` was given."""
        data = self.read(blob)
        with blame(self.path(blob)):
            return unsealed(data, format_)

    def read_tensors(self, blob: str) -> dict[str, Tensor]:
        """What `write_tensors` was given."""
        data = self.read(blob)
        with blame(self.path(blob)):
            # Names, dtypes, offsets and raw numbers: no code to run, and the bytes are as written.
            return safetensors.torch.load(data)

    def size(self, blob: str) -> int:
        """How many bytes a blob has."""
        with blame(self.path(blob)):
            return self.path(blob).stat().st_size

    def names(self) -> set[str]:
        """All blobs that are there."""
        return {file.name for file in self._files() if BLOB.fullmatch(file.name)}

    def sweep(self, kept: Container[str]) -> None:
        """Remove what is not kept; files that are no blobs stay.

        What cannot be removed harms nobody: it goes with a later change.
        """
        with contextlib.suppress(OSError):
            for file in list(self._files()):
                blob = BLOB.fullmatch(file.name) and file.name not in kept
                if blob or TEMPORARY.fullmatch(file.name):
                    file.unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from self.folder.iterdir()
