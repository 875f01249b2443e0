"""Store a domain whose files were uploaded, after checking them against the backbone."""

from __future__ import annotations

from pathlib import Path

from ..ecology import Ecology
from ..ecology.importing import import_domain
from .catalog import check_servable


def store_upload(ecology: Ecology, name: str, folder: Path, replace: bool) -> None:
    """Store the files that ``export --to domain`` wrote, under a name, if they can be served."""
    import_domain(ecology, folder, name, replace=replace, what="upload", check=check_servable)
