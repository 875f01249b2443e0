"""One HTML file about an ecology: its domains, how well they do and what they cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CovNormError
from ..records import blame, write_file
from .facts import facts_of
from .page import render

__all__ = ["facts_of", "write_report"]


def write_report(facts: Mapping[str, Any], file: str | os.PathLike[str]) -> Path:
    """Write the report of an ecology, whole or not at all; equal facts give equal bytes.

    The page is one file: no script, no other file, no network.

    Args:
        facts: {"ecology": {"name", "backbone": {"name", "parameters", "bytes", "fingerprint"},
            "made", "version"}, "bases": [{"name", "parameters", "bytes", "domains", "ranks"}],
            "domains": [a domain's stored record, with "images": {key: PNG bytes}]}.
        file: the file to write; a missing folder is created.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CovNormError(
            f"a report needs {error.name}: pip install 'torch-covnorm[report]'"
        ) from error
    path = Path(file)
    # A folder's name may not be UTF-8: what cannot be written becomes a question mark.
    page = render(facts).encode("utf-8", errors="replace")
    with blame(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, page)
    return path
