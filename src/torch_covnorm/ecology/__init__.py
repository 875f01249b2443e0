"""The store: a folder with one backbone, many domains, and the bases that they share."""

from __future__ import annotations

from .manifest import Entry, Version
from .store import Details, Ecology
from .verify import verify

__all__ = ["Details", "Ecology", "Entry", "Version", "verify"]
