"""Files that are named by their content and never change: ``sha256.json``, ``sha256.safetensors``.

``sha256.py`` is the source of a backbone that is the user's code.

A blob that the manifest does not name is garbage, left by a killed process or a removed domain.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..errors import CovNormError
from ..records import blame, read_whole, sealed, unsealed, write_file
from ..stats.moments import Moments

MOMENTS = ("n", "images", "mean", "scatter")
BLOB = re.compile(r"([0-9a-f]{64})\.(json|safetensors|py)")
TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.(json|safetensors|py)\.[0-9a-f]{16}")


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

    def write_moments(self, moments: Mapping[str, Moments]) -> str:
        """Store {site: moments} in float64: n, images, mean (d,), scatter (d(d+1)/2,).

        The scatter is symmetric, so only its upper half is stored.
        """
        tensors: dict[str, Tensor] = {}
        for site, m in moments.items():
            state = m.state_dict()
            state["scatter"] = state["scatter"][*torch.triu_indices(m.d, m.d)]
            tensors |= {f"{site}/{part}": value.cpu() for part, value in state.items()}
        return self.write_tensors(tensors)

    def read_moments(self, blob: str) -> dict[str, Moments]:
        """Return what `write_moments` was given."""
        tensors, moments = self.read_tensors(blob), {}
        sites = dict.fromkeys(key.rpartition("/")[0] for key in tensors)
        with blame(self.path(blob)):
            if set(tensors) != {f"{site}/{part}" for site in sites for part in MOMENTS}:
                raise CovNormError("is not a file of moments: restore it from a copy")
            for site in sites:
                state = {part: tensors[f"{site}/{part}"] for part in MOMENTS}
                d, half = len(state["mean"]), state["scatter"]
                if half.shape != (d * (d + 1) // 2,):
                    raise CovNormError(f"site {site!r}: the scatter has the wrong shape")
                rows, columns = torch.triu_indices(d, d)
                state["scatter"] = half.new_empty(d, d)
                state["scatter"][rows, columns] = state["scatter"][columns, rows] = half
                moments[site] = Moments.from_state(state)
        return moments

    def size(self, blob: str) -> int:
        """Return the number of bytes of a blob."""
        with blame(self.path(blob)):
            return self.path(blob).stat().st_size

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes of every blob in the folder, by name."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as files:
            for file in files:
                if BLOB.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        sizes[file.name] = file.stat().st_size
        return sizes

    def names(self) -> set[str]:
        """Return the names of all blobs in the folder."""
        return {file.name for file in self.folder.glob("*") if BLOB.fullmatch(file.name)}

    def sweep(self, kept: Container[str]) -> None:
        """Remove the blobs that are not in `kept`, and leave files that are not blobs alone.

        What cannot be removed now is harmless, and a later change removes it.
        """
        with contextlib.suppress(OSError):
            for file in list(self.folder.glob("*")):
                unused = BLOB.fullmatch(file.name) and file.name not in kept
                if unused or TEMPORARY.fullmatch(file.name):
                    file.unlink(missing_ok=True)
