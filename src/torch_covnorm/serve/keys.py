"""The keys that open the server."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers

from ..errors import CovNormError
from ..records import blame

SHORTEST = 16  # characters


class Keys:
    """The keys that open the server; none: it is open. Compared in constant time, as digests."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [self._digest(key) for key in keys]

    @classmethod
    def read(cls, file: Path | None) -> Keys:
        """One key a line; empty lines and those that begin with # are none."""
        if file is None:
            return cls()
        with blame(file):
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise CovNormError(f"{file}: holds no key: write one a line")
        for key in keys:
            if len(key) < SHORTEST:
                raise CovNormError(
                    f"{file}: a key of {len(key)} characters can be guessed: take {SHORTEST} or "
                    "more"
                )
            if not key.isascii() or not key.isprintable() or " " in key:
                raise CovNormError(
                    f"{file}: a key has characters that no header carries: take ASCII without "
                    "spaces"
                )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def open(self, headers: Headers) -> bool:
        """Whether a request may come in: Bearer, X-API-Key, or Basic with the key as password."""
        given = self._digest(_given(headers))
        found = False
        for digest in self._digests:  # all of them, so that time tells nothing
            found |= hmac.compare_digest(digest, given)
        return found or not self._digests

    @staticmethod
    def _digest(key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _given(headers: Headers) -> str:
    if key := headers.get("x-api-key"):
        return key
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
    return ""
