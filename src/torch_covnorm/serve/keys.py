"""The API keys that clients must send."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers

from ..errors import CovNormError
from ..records import blame

SHORTEST = 16  # characters


class Keys:
    """API keys, compared as digests in constant time. Without keys, everyone has access."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, file: Path | None) -> Keys:
        """Read a file with one key per line; empty lines and `#` comments are skipped."""
        if file is None:
            return cls()
        with blame(file):
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise CovNormError(f"{file}: the file has no key: add one key per line")
        for key in keys:
            if len(key) < SHORTEST:
                raise CovNormError(
                    f"{file}: a key has only {len(key)} characters: use at least {SHORTEST}"
                )
            if not key.isascii() or not key.isprintable() or " " in key:
                raise CovNormError(
                    f"{file}: a key has characters that an HTTP header cannot carry: use printable "
                    "ASCII without spaces"
                )
        return cls(keys)

    def allow(self, headers: Headers) -> bool:
        """Return whether a request has a key: Bearer, X-API-Key, or the password of Basic."""
        given = _digest(_key_in(headers))
        # All of them are compared, so that the time tells nothing about the keys.
        matches = [hmac.compare_digest(digest, given) for digest in self._digests]
        return any(matches) or not self._digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_in(headers: Headers) -> str:
    if key := headers.get("x-api-key"):
        return key
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # not base64, or not UTF-8
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
    return rest.strip() if scheme.lower() == "bearer" else ""
