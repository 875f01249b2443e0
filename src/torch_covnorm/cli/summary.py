"""A domain's results as several commands print them: the JSON of `add`, and tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..ecology import Ecology
from ..report.wording import size
from .screen import table

STAGES = {
    "before": "bare features, linear head",
    "adapted": "trained A",
    "compressed": "compressed, not tuned",
    "final": "as stored",
}


def add_result(ecology: Ecology, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `add --json` prints."""
    results, entry = facts["results"], ecology.entry(name)
    return {
        "domain": name,
        "method": facts["method"],
        "accuracy": results["accuracy"],
        "on": results["on"],
        "parameters": {
            "adapter": entry.parameters,
            "total": entry.total,
            "backbone": ecology.backbone["parameters"],
        },
        "bytes": entry.bytes,
        "dtype": results["dtype"],
        "declined": results["declined"],
        "unreadable": facts["source"]["left_out"],
        "duplicates": facts["source"]["twice"],
        "ranks": results["ranks"],
        "seconds": {k: round(v, 3) for k, v in results["seconds"].items()},
    }


def summary(ecology: Ecology, name: str, facts: Mapping[str, Any]) -> list[Table | str]:
    """Return a table of the accuracy after each stage, and lines about what the domain costs."""
    results, entry, backbone = facts["results"], ecology.entry(name), ecology.backbone
    rows = [
        (STAGES[stage], value) for stage, value in results["accuracy"].items() if value is not None
    ]
    uncompressed = max(results["denominators"]["ra"], 1)
    lines = [
        f"adapters {entry.parameters:,} parameters: {entry.parameters / backbone['parameters']:.2%}"
        f" of the backbone, {entry.parameters / uncompressed:.1%} of uncompressed adapters",
        f"file     {size(entry.bytes)} ({results['dtype']}; with norms, head and record): "
        f"{entry.bytes / backbone['bytes']:.2%} of the backbone's {size(backbone['bytes'])}",
    ]
    if results.get("declined"):
        lines.append("note: tuning lowered the validation accuracy, so the untuned domain is kept")
    if results.get("whole"):
        n = facts["source"]["images"].get("val", 0)
        lines.append(
            f"note: no smaller adapter stays within --max-drop on {n:,} validation images, so A is "
            "stored uncompressed. Use --budget or --variance to compress it."
        )
    return [table(name, ("", f"{results['on']} accuracy %"), rows), *lines]
