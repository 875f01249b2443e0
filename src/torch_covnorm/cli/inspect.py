"""`list`, `show`, `remove`, `verify`, `report`: the commands that look after an ecology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..ecology import Ecology
from ..ecology import verify as verify_files
from ..records import blame
from ..report.wording import size
from ..stats.ranks import by_variance
from .options import Common, Name, domain_names, ecology_folder
from .screen import table

STAGES = {
    "before": "bare features, linear head",
    "adapted": "trained, not compressed",
    "compressed": "compressed, not tuned",
    "final": "as stored",
}
RANKS = ("site", "d", "k_x", "k_y", "η = k_y/k_x", "x for 99 %", "y for 99 %", "A for 99 %")
LISTED = ("method", "classes", "accuracy", "parameters", "total", "bytes", "basis")


def list_(*, common: Common) -> None:
    """List the domains: method, classes, accuracy, size.

    covnorm list --json
    """
    ecology, backbone = common.ecology, common.ecology.backbone
    value: list[dict[str, Any]] = [
        {"domain": name, **{key: getattr(entry, key) for key in LISTED}}
        for name, entry in ecology.domains.items()
    ]
    shown = ("domain", "method", "classes", "accuracy", "parameters")
    rows = []
    for row in value:
        share = f"{row['parameters'] / backbone['parameters']:.2%}"
        rows.append([*(row[key] for key in shown), share, size(row["bytes"])])
    columns = ("domain", "method", "classes", "accuracy %", "adapter", "of backbone", "file")
    bases = [ecology.blobs.size(blobs["tensors"]) for blobs in ecology.bases.values()]
    total = size(sum(row["bytes"] for row in value) + sum(bases))
    common.screen.result(
        value,
        table("", columns, rows),
        f"{len(rows)} domain{'s' * (len(rows) != 1)}: {total}"
        f"{' including what they share' * bool(bases)}, in addition to the "
        f"{size(backbone['bytes'])} of {backbone['name'] or backbone['class']}",
    )


def show(name: Name, *, common: Common) -> None:
    """Show a domain: accuracy by stage, sizes, ranks per layer (η = k_y/k_x), storage, history.

    covnorm show flowers
    """
    ecology = common.ecology
    facts, record = ecology.details(name), ecology.record(name)
    facts = {k: v for k, v in facts.items() if k not in ("format", "version", "versions")}
    described = {key: record[key] for key in ("classes", "preprocessing", "basis")}
    with blame(ecology.blobs.path(ecology.entry(name).blobs["details"])):
        shown = [*summary(ecology, name, facts), *_details(facts)]
    common.screen.result({"domain": name, **described, **facts}, *shown)


def summary(ecology: Ecology, name: str, facts: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield a table of the accuracy after each stage, and lines about what the domain costs."""
    results, entry, backbone = facts["results"], ecology.entry(name), ecology.backbone
    rows = [(STAGES[stage], a) for stage, a in results["accuracy"].items() if a is not None]
    yield table(name, ("", f"{results['on']} accuracy %"), rows)
    yield (
        f"adapters {entry.parameters:,} parameters: {entry.parameters / backbone['parameters']:.2%}"
        f" of the backbone, {entry.parameters / max(results['denominators']['ra'], 1):.1%} of "
        "uncompressed adapters"
    )
    yield (
        f"file     {size(entry.bytes)} ({results['dtype']}; with norms, head and record): "
        f"{entry.bytes / backbone['bytes']:.2%} of the backbone's {size(backbone['bytes'])}"
    )
    if results.get("declined"):
        yield "note: tuning lowered the validation accuracy, so the untuned domain is kept"
    if results.get("whole"):
        yield (
            "note: no smaller adapter stays within --max-drop on "
            f"{facts['source']['images'].get('val', 0):,} validation images, so A is stored "
            "uncompressed. Use --budget or --variance to compress it."
        )


def _details(facts: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield the tables and lines about a domain's ranks, sizes, storage, losses and history."""
    results = facts["results"]
    if results["ranks"]:
        yield table("ranks", RANKS, [_rank_row(results, site) for site in results["ranks"]])
    denominators = results["denominators"]
    shares = [
        (part, count, *(f"{count / max(n, 1):.2%}" for n in denominators.values()))
        for part, count in results["parameters"].items()
    ]
    yield table("sizes", ("parameters", "", *(f"of {k}" for k in denominators)), shares)
    yield ", ".join(f"{k}: {n:,}" for k, n in denominators.items())
    if results.get("storage"):
        costs = [
            (f"{k}{', as stored' * (k == results['dtype'])}", size(c["bytes"]), c["accuracy"])
            for k, c in results["storage"].items()
        ]
        yield table("storage", ("precision", "file", "validation accuracy %"), costs)
    if results.get("predicted"):
        loss, error = results["predicted"]["loss"], results["predicted"]["error"]
        spread = "" if error is None else f" ± {error:.2g}"
        yield f"predicted increase of the loss by compression: {loss:.3g}{spread} per image"
    if results.get("forgetting"):
        yield ", ".join(f"forgetting: {k} {v:.4g}" for k, v in results["forgetting"].items())
    keys = ("time", "what", "method", "accuracy", "parameters")
    events = [[event[key] for key in keys] for event in facts["history"]]
    yield table("history", ("time", "", "method", "accuracy %", "adapter"), events)


def _rank_row(results: dict[str, Any], site: str) -> tuple[Any, ...]:
    """Return a site's ranks, and how many directions hold 99 % of x, of y and of A itself."""
    kx, ky = results["ranks"][site]
    ratio = f"{ky / kx:.2f}" if kx else None  # rank 0: only a constant is left
    spectra = results["spectra"].get(site)
    needed: list[int | None] = [None] * 3
    if spectra:
        x, y, A = (torch.tensor(spectra[key], dtype=torch.float64) for key in "xyA")
        needed = [by_variance(E, 0.99) for E in (x, y, A**2)]
    return (site, results["widths"][site], kx, ky, ratio, *needed)


def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DOMAIN…", autocompletion=domain_names, help="Names of the domains to remove."
        ),
    ],
    *,
    common: Common,
) -> None:
    """Remove domains. The others do not change by a single byte.

    covnorm remove flowers
    """
    common.ecology.remove(names)
    common.screen.result({"removed": names}, f"removed: {', '.join(names)}")


def verify(*, common: Common) -> None:
    """Check every file of the ecology; exit with code 2 if one is damaged or missing.

    covnorm verify
    """
    with common.screen.reporting() as reporter:
        reporter.stage("verify", "checksums of all files, records, and the backbone's fingerprint")
        problems = verify_files(ecology_folder(common.where), progress=reporter.images)
    value = {"ok": not problems, "problems": problems}
    common.screen.result(value, *(problems or ["no problems found"]))
    if problems:
        raise typer.Exit(2)


def report(
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    *,
    common: Common,
) -> None:
    """Write one HTML file about the ecology: figures, ranks, confusion matrices, sample images.

    covnorm report --out house.html
    """
    from ..report import facts_of, write_report

    write_report(facts_of(common.ecology), out)
    common.screen.result({"file": str(out)}, f"wrote {out} ({size(out.stat().st_size)})")
