"""An ecology: a folder with one backbone, many domains, and what they share."""

from __future__ import annotations

from .manifest import Entry
from .store import Details, Ecology
from .verify import verify

__all__ = ["Details", "Ecology", "Entry", "verify"]
