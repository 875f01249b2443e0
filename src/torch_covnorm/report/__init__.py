"""One HTML file about an ecology: its domains, how well they do and what they cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..ecology import Ecology
from ..errors import CovNormError
from ..records import blame, write_file
from ..version import __version__
from .page import render

__all__ = ["facts_of", "write_report"]

# Results of every domain that was added, joined or uploaded. Others may lack them.
RESULTS = {"on", "accuracy", "parameters", "denominators", "bytes", "dtype"}


def facts_of(ecology: Ecology) -> dict[str, Any]:
    """Return what `write_report` takes; domains stored without results are only named."""
    backbone, entries = ecology.backbone, ecology.domains
    domains, left_out = {}, []
    for name in entries:
        record, facts = ecology.record(name), ecology.details(name)
        complete = set(facts.get("results", ())) >= RESULTS
        if not complete or "images" not in facts.get("source", ()):
            left_out.append(name)
            continue
        kept = {k: record[k] for k in ("classes", "preprocessing", "basis")}
        domains[name] = {"name": name, **kept, **facts, "images": ecology.examples(name)}
    bases = []
    for name, blobs in ecology.bases.items():
        users = [n for n, entry in entries.items() if entry.basis == name]
        if first := next((domains[n]["results"] for n in users if n in domains), None):
            bases.append(
                {
                    "name": name,
                    "parameters": first["parameters"].get("shared", 0),
                    "bytes": ecology.blobs.size(blobs["tensors"]),
                    "domains": users,
                    "ranks": first["ranks"],
                }
            )
    about = {k: backbone[k] for k in ("parameters", "bytes", "fingerprint")}
    return {
        "ecology": {
            "name": ecology.folder.resolve().name,
            "backbone": {"name": backbone["name"] or backbone["class"], **about},
            "made": datetime.now(UTC).date().isoformat(),
            "version": __version__,
        },
        "bases": bases,
        "domains": list(domains.values()),
        "left_out": left_out,
    }


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
