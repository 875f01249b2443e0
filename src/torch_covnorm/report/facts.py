"""What the report shows of an ecology, as plain values."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..ecology import Ecology
from ..version import __version__

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
