"""A backbone that is a function in the user's file: its source in the store, and who may run it.

Source is code, and running it may do anything. So the store's code runs only for the user who made
the ecology on this machine, or for one who says so with `trust_code`. What a user has approved is
listed in a file outside of every store, which no store can change.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import os
import sys
import warnings
from pathlib import Path

from torch import nn

from ..errors import CovNormError, CovNormWarning, choices
from ..records import blame

APPROVED = "approved-code"  # one line per function: SHA-256 of the source, name of the function


class CodeNotApproved(CovNormError):
    """The code of a store that this user has not approved. It was not run."""


class _Source(importlib.abc.InspectLoader):
    """Loads a module from bytes, so that what runs is what was checked."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data = name, data

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return importlib.util.decode_source(self.data)

    def is_package(self, fullname: str) -> bool:  # noqa: ARG002
        return False


def is_function(backbone: str) -> bool:
    """Return whether a backbone is given as ``file.py:function``."""
    return backbone.rpartition(":")[0].endswith(".py")


def read_function(backbone: str) -> tuple[bytes, str]:
    """Return the source and the function's name of ``file.py:function``."""
    file, _, function = backbone.rpartition(":")
    with blame(Path(file)):
        return Path(file).read_bytes(), function


def run(data: bytes, function: str, origin: str) -> nn.Module:
    """Run source and call its function, which returns the backbone. Ask `is_approved` before.

    origin: how error messages call the source.
    """
    name = f"covnorm_backbone_{digest(data)[:16]}"
    loader = _Source(name, data)
    spec = importlib.util.spec_from_loader(name, loader, origin=origin)
    assert spec is not None  # it has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        loader.exec_module(module)
        make = vars(module).get(function)
        if not callable(make):
            known = [n for n, v in vars(module).items() if callable(v) and v.__module__ == name]
            raise CovNormError(f"has no function {function!r}: {choices(function, known)}")
        net = make()
    except CovNormError as error:
        raise CovNormError(f"{origin}: {error}") from None
    except ModuleNotFoundError as error:
        raise CovNormError(
            f"{origin}: cannot import {error.name}. The ecology keeps this one file: it may import "
            "installed packages, but no files beside it."
        ) from error
    except Exception as error:  # it is the user's code, which may raise anything
        raise CovNormError(
            f"{origin}: {function}() raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(net, nn.Module):
        raise CovNormError(
            f"{origin}: {function}() returned a {type(net).__name__}. Return an nn.Module."
        )
    return net


def digest(data: bytes) -> str:
    """Return SHA-256 of source."""
    return hashlib.sha256(data).hexdigest()


def approvals() -> Path:
    """Return the file that lists the code that this user has approved."""
    config = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(config) if config and Path(config).is_absolute() else Path.home() / ".config"
    return folder / "torch-covnorm" / APPROVED


def approve(data: bytes, function: str) -> None:
    """Add a function of some source to what this user has approved."""
    if is_approved(data, function):
        return
    file = approvals()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        append = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(append, "wb") as stream:  # one write of one line: others may append as well
            stream.write(f"{digest(data)} {function}\n".encode())
    except OSError as error:
        warnings.warn(
            f"{file}: {error.strerror or error}, so later commands need --trust-code to run the "
            "backbone's code",
            CovNormWarning,
            stacklevel=2,
        )


def is_approved(data: bytes, function: str) -> bool:
    """Return whether this user has approved a function of some source.

    A list that others could have written counts for nothing.
    """
    file = approvals()
    try:
        found, folder = file.stat(follow_symlinks=False), file.parent.stat()
        if any(s.st_uid != os.getuid() or s.st_mode & 0o022 for s in (found, folder)):
            return False
        return f"{digest(data)} {function}" in file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return False


def check_approved(data: bytes, function: str, file: Path) -> None:
    """Refuse code of a store that this user has not approved."""
    if not is_approved(data, function):
        raise CodeNotApproved(
            f"{file}: this ecology's backbone is code, the function {function!r} in source with "
            f"SHA-256 {digest(data)}, which was not approved on this machine by this user. Read "
            "the file. If you trust it, run the command with --trust-code (in Python: "
            "Ecology(folder, trust_code=True))."
        )
