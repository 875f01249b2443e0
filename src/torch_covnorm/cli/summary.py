"""The words and tables for a domain's results, as several commands show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..ecology import Ecology
from .screen import size, table

STAGES = {
    "before": "bare features, linear head",
    "adapted": "trained A",
    "compressed": "compressed, not tuned",
    "final": "as stored",
}


def added(ecology: Ecology, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `add --json` prints."""
    results, entry, backbone = facts["results"], ecology.entry(name), ecology.backbone
    return {
        "domain": name,
        "method": facts["method"],
        "accuracy": results["accuracy"],
        "on": results["on"],
        "parameters": {
            "adapter": entry.parameters,
            "total": entry.total,
            "backbone": backbone["parameters"],
        },
        "bytes": entry.bytes,
        "dtype": results["dtype"],
        "declined": results["declined"],
        "unreadable": facts["source"]["left_out"],
        "duplicates": facts["source"]["twice"],
        "ranks": results["ranks"],
        "seconds": {k: round(v, 3) for k, v in results["seconds"].items()},
    }


def stages_table(ecology: Ecology, name: str, facts: Mapping[str, Any]) -> list[Table | str]:
    """Accuracy by stage, and what the domain costs."""
    results, entry, backbone = facts["results"], ecology.entry(name), ecology.backbone
    rows = [
        (STAGES[stage], value) for stage, value in results["accuracy"].items() if value is not None
    ]
    network, ra = backbone["parameters"], results["denominators"]["ra"]
    lines = [
        f"adapters {entry.parameters:,} parameters: {entry.parameters / network:.2%} of the "
        f"backbone, {entry.parameters / max(ra, 1):.1%} of uncompressed adapters",
        f"file     {size(entry.bytes)} ({results['dtype']}; norms, head and record too): "
        f"{entry.bytes / backbone['bytes']:.2%} of the backbone's {size(backbone['bytes'])}",
    ]
    if results.get("declined"):
        lines.append("note: tuning validated worse than no tuning, so the untuned one is kept")
    if results.get("whole"):
        n = facts["source"]["images"].get("val", 0)
        lines.append(
            f"note: no smaller adapter stays within --max-drop on {n:,} validation images, so A is "
            "kept whole: --budget or --variance compress it"
        )
    return [table(name, ("", f"{results['on']} accuracy %"), rows), *lines]
