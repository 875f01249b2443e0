"""What the report shows of an ecology."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..ecology import Ecology
from ..version import __version__

# What is known of every domain that was added, joined or uploaded, and of others perhaps not.
RESULTS = ("on", "accuracy", "parameters", "denominators", "bytes", "dtype")


def facts_of(ecology: Ecology) -> dict[str, Any]:
    """All that the report shows; domains that were put without results are named, no more."""
    backbone = ecology.backbone
    entries = ecology.domains
    domains, left_out = [], []
    for name in entries:
        record, facts = ecology.record(name), ecology.details(name)
        known = set(facts.get("results", ())) >= {*RESULTS}
        if not known or "images" not in facts.get("source", ()):
            left_out.append(name)
            continue
        facts["results"]["backbone_bytes"] = backbone["bytes"]
        kept = {k: record[k] for k in ("classes", "preprocessing", "basis")}
        domains.append({"name": name, **kept, **facts, "images": ecology.examples(name)})
    bases = []
    for name, blobs in ecology.bases.items():
        users = [n for n, entry in entries.items() if entry.basis == name]
        first = next((d["results"] for d in domains if d["name"] in users), None)
        if first is None:
            continue
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
        "domains": domains,
        "left_out": left_out,
    }
