"""`list`, `show`, `remove`, `verify`, `report`: what an ecology holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..ecology import Ecology
from ..ecology import verify as verify_files
from ..records import blame
from ..stats.ranks import by_variance
from .options import Json, Name, Quiet, Where, domain_names, find, place
from .screen import Screen, size, table
from .summary import stages_table


def list_(where: Where = None, json: Json = False, quiet: Quiet = False) -> None:
    """List the domains: method, classes, accuracy, size.

    covnorm list --json
    """
    screen, ecology = Screen(json, quiet), find(where)
    backbone = ecology.backbone
    value: list[dict[str, Any]] = [
        {
            "domain": name,
            "method": entry.method,
            "classes": entry.classes,
            "accuracy": entry.accuracy,
            "parameters": entry.parameters,
            "total": entry.total,
            "bytes": entry.bytes,
            "basis": entry.basis,
        }
        for name, entry in ecology.domains.items()
    ]
    rows = [
        (
            row["domain"],
            row["method"],
            row["classes"],
            row["accuracy"],
            row["parameters"],
            f"{row['parameters'] / backbone['parameters']:.2%}",
            size(row["bytes"]),
        )
        for row in value
    ]
    columns = ("domain", "method", "classes", "accuracy %", "adapter", "of backbone", "file")
    shared = [ecology.blobs.size(blobs["tensors"]) for blobs in ecology.bases.values()]
    total = size(sum(row["bytes"] for row in value) + sum(shared))
    what = f"{len(rows)} domain{'s' * (len(rows) != 1)}"
    screen.result(
        value,
        table("", columns, rows),
        f"{what} in {total}{', what they share included,' * bool(shared)} beside one "
        f"{backbone['name'] or backbone['class']} of {size(backbone['bytes'])}",
    )


def show(name: Name, where: Where = None, json: Json = False, quiet: Quiet = False) -> None:
    """Show a domain: accuracy by stage, sizes, ranks and η = k_y/k_x a layer, storage, history.

    covnorm show flowers
    """
    screen, ecology = Screen(json, quiet), find(where)
    facts, record = ecology.details(name), ecology.record(name)
    facts = {k: v for k, v in facts.items() if k not in ("format", "version", "versions")}
    value = {
        "domain": name,
        "classes": record["classes"],
        "preprocessing": record["preprocessing"],
        "basis": record["basis"],
        **facts,
    }
    with blame(ecology.blobs.path(ecology.entry(name).blobs["details"])):
        shown = _shown(ecology, name, facts)
    screen.result(value, *shown)


def _shown(ecology: Ecology, name: str, facts: dict[str, Any]) -> list[Any]:
    """The tables of `show`."""
    results = facts["results"]
    shown: list[Any] = stages_table(ecology, name, facts)
    if results["ranks"]:
        shown += [table("ranks", RANKS, [_rank_row(results, s) for s in results["ranks"]])]
    shares = [
        (kind, count, *(f"{count / max(n, 1):.2%}" for n in results["denominators"].values()))
        for kind, count in results["parameters"].items()
    ]
    columns = ("parameters", "", *(f"of {k}" for k in results["denominators"]))
    shown += [table("sizes", columns, shares)]
    shown += [", ".join(f"{k}: {n:,}" for k, n in results["denominators"].items())]
    if results.get("storage"):
        costs = [
            (f"{name}{', as it is' * (name == results['dtype'])}", size(c["bytes"]), c["accuracy"])
            for name, c in results["storage"].items()
        ]
        shown += [table("storage", ("stored as", "file", "validation accuracy %"), costs)]
    lines = [
        (e["time"], e["what"], e["method"], e["accuracy"], e["parameters"])
        for e in facts["history"]
    ]
    if results.get("predicted"):
        loss, error = results["predicted"]["loss"], results["predicted"]["error"]
        spread = "" if error is None else f" ± {error:.2g}"
        shown += [f"the compression costs {loss:.3g}{spread} of the loss an image, as predicted"]
    if results.get("forgetting"):
        shown += [", ".join(f"forgetting: {k} {v:.4g}" for k, v in results["forgetting"].items())]
    return [*shown, table("history", ("time", "", "method", "accuracy %", "adapter"), lines)]


RANKS = ("site", "d", "k_x", "k_y", "η = k_y/k_x", "x for 99 %", "y for 99 %", "A for 99 %")


def _rank_row(results: dict[str, Any], site: str) -> tuple[Any, ...]:
    """Ranks of a site beside how many directions hold 99 % of x, of y, and of A itself."""
    kx, ky = results["ranks"][site]
    spectra = results["spectra"].get(site)
    need = [_needed(spectra[k], 2 if k == "A" else 1) for k in "xyA"] if spectra else [None] * 3
    ratio = f"{ky / kx:.2f}" if kx else None  # nothing but a constant is left there
    return (site, results["widths"][site], kx, ky, ratio, *need)


def _needed(values: list[float], power: int) -> int:
    """How many of the largest hold 99 % of all; of singular values, their squares."""
    return by_variance(torch.tensor(values, dtype=torch.float64) ** power, 0.99)


def remove(
    names: Annotated[
        list[str],
        typer.Argument(metavar="DOMAIN…", autocompletion=domain_names, show_default=False),
    ],
    where: Where = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forget domains; the others stay as they are, to the byte.

    covnorm remove flowers
    """
    screen, ecology = Screen(json, quiet), find(where)
    ecology.remove(names)
    screen.result({"removed": names}, f"removed: {', '.join(names)}")


def verify(where: Where = None, json: Json = False, quiet: Quiet = False) -> None:
    """Check every byte of the ecology; exit code 2 where something is damaged or missing.

    covnorm verify
    """
    screen = Screen(json, quiet)
    folder = place(where)
    with screen.reporting() as reporter:
        reporter.stage("verify", "checksums of all files, records, and the backbone's fingerprint")
        problems = verify_files(folder, progress=reporter.images)
    value = {"ok": not problems, "problems": problems}
    screen.result(value, *problems, "all is well" if not problems else "")
    if problems:
        raise typer.Exit(2)


def report(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    where: Where = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML file about the ecology: figures, ranks, confusion, sample images.

    covnorm report --out house.html
    """
    from ..report import facts_of, write_report

    screen, ecology = Screen(json, quiet), find(where)
    write_report(facts_of(ecology), out)
    screen.result({"file": str(out)}, f"wrote {out} ({size(out.stat().st_size)})")
