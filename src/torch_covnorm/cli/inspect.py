"""`list`, `show`, `verify`, `report`: the commands that look at an ecology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..ecology import Ecology
from ..ecology import verify as verify_files
from ..ecology.space import Space, space
from ..records import blame
from ..report.wording import size
from ..stats.ranks import by_variance
from .options import Common, Name, Opening, ecology_folder
from .screen import table

STAGES = {
    "before": "bare features, linear head",
    "adapted": "trained, not compressed",
    "compressed": "compressed, not tuned",
    "final": "as stored",
}
RANKS = ("site", "d", "k_x", "k_y", "η = k_y/k_x", "x for 99 %", "y for 99 %", "A for 99 %")
KEPT = {
    "trained": "trained A",
    "moments": "moments",
    "examples": "examples",
    "details": "results",
    "versions": "earlier versions",
}
LISTED = ("method", "classes", "accuracy", "parameters", "total", "bytes", "basis")


def list_(*, common: Common) -> None:
    """List the domains: method, classes, accuracy, size; and what takes space beside them.

    covnorm list --json
    """
    ecology, backbone = common.ecology, common.ecology.backbone
    taken, versions = space(ecology), ecology.versions
    value: list[dict[str, Any]] = []
    for name, entry in ecology.domains.items():
        kept = taken.kept_of.get(name, {})
        row = {"domain": name, **{key: getattr(entry, key) for key in LISTED}}
        row |= {"kept_bytes": sum(kept.values()), "kept": kept}
        value.append({**row, "versions": len(versions.get(name, ()))})
    shown = ("domain", "method", "classes", "accuracy", "parameters")
    rows = []
    for row in value:
        share = f"{row['parameters'] / backbone['parameters']:.2%}"
        cells = [row[key] for key in shown]
        rows.append([*cells, share, size(row["bytes"]), size(row["kept_bytes"])])
    columns = ("domain", "method", "classes", "accuracy %", "adapter", "of backbone", "file")
    shared = " including what they share" if ecology.bases else ""
    common.screen.result(
        value,
        table("", (*columns, "kept"), rows),
        f"{len(rows)} domain{'s' * (len(rows) != 1)}: {size(taken.served)}{shared}, in addition "
        f"to the {size(backbone['bytes'])} of {backbone['name'] or backbone['class']}",
        *_lines_about(taken, [name for name in versions if name not in ecology.domains]),
    )


def _lines_about(taken: Space, removed: list[str]) -> Iterator[str]:
    """Yield lines about what takes space beside what is served."""
    parts = [f"{KEPT[kind]} {size(n)}" for kind, n in taken.kept.items() if n]
    if parts:
        yield f"kept for later: {size(sum(taken.kept.values()))} ({', '.join(parts)})"
    beside = {"decoded images": taken.cache, "unfinished work": taken.work}
    parts = [f"{size(n)} of {what}" for what, n in beside.items() if n]
    if parts:
        yield f"beside them: {', '.join(parts)}; to free: covnorm gc --cache"
    if removed:
        names = ", ".join(removed[:8]) + (", …" if len(removed) > 8 else "")
        yield f"removed, can be restored by covnorm rollback: {names}"


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
    if results.get("linear"):
        val = facts["source"]["images"].get("val", 0)
        yield (
            f"note: on {val:,} validation images the adapters were worse than a linear head on the "
            "frozen backbone, so that head is stored. More images, a larger --size or another "
            "backbone may help."
        )
    else:
        measured = facts.get("source", {}).get("images", {}).get(results["on"], 0)
        if note := below_linear(results, measured):
            yield note
        if results.get("declined"):
            yield "note: tuning lowered the validation accuracy, so the untuned domain is kept"
    if results.get("whole"):
        yield (
            "note: no smaller adapter stays within --max-drop on "
            f"{facts['source']['images'].get('val', 0):,} validation images, so A is stored "
            "uncompressed. Use --budget or --variance to compress it."
        )


def below_linear(results: Mapping[str, Any], images: int) -> str | None:
    """Return a note if the stored domain is less accurate than the linear head was.

    By more than one standard error of the linear head on so many images.
    """
    linear, final = (results["accuracy"].get(stage) for stage in ("before", "final"))
    if linear is None or final is None or not images:
        return None
    if linear - final <= (linear * (100 - linear) / images) ** 0.5:
        return None
    return (
        f"note: on {images:,} {results['on']} images this is worse than a linear head on the "
        f"frozen backbone ({final:.1f} % against {linear:.1f} %), which the validation images did "
        "not show. Leave out --lr if you gave it, or add more images."
    )


def _details(facts: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield the tables and lines about a domain's ranks, sizes, storage, losses and history."""
    results = facts["results"]
    if results.get("choices"):
        yield table("chosen", ("", ""), list(_chosen(results["choices"])))
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


def _chosen(choices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the training chose, as pairs of name and value."""
    for name, value in choices.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for key, part in parts:
            shown = part if isinstance(part, dict) else {"": part}
            text = ", ".join(f"{k}: {v}" if k else str(v) for k, v in shown.items())
            yield f"{name} {key}".strip(), text


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


def verify(*, common: Opening) -> None:
    """Check every file of the ecology; exit with code 2 if one is damaged or missing.

    covnorm verify
    """
    with common.screen.reporting() as reporter:
        reporter.stage("verify", "checksums of all files, records, and the backbone's fingerprint")
        folder, trust = ecology_folder(common.where), common.trust_code
        problems = verify_files(folder, progress=reporter.images, trust_code=trust)
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
