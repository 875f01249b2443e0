"""`import`, `remove`, `history`, `rollback`, `gc`: the commands for the life of a domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..ecology.cleaning import collect_garbage, purge
from ..ecology.importing import import_domain
from ..errors import CovNormError
from ..report.wording import size
from ..serve.catalog import check_servable
from .options import Common, Opening, domain_names, version_names
from .screen import table

SHOWN = 12  # characters of a digest
KINDS = {
    "versions": "earlier versions",
    "leftovers": "files of killed processes",
    "work": "unfinished work",
    "cache": "decoded images",
}
Restorable = typer.Argument(
    metavar="DOMAIN…", autocompletion=version_names, help="Names of domains, also of removed ones."
)


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that export --to domain wrote.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the domain. Default: its name in the folder.")
    ] = None,
    basis: Annotated[
        str | None, typer.Option(help="Another name for the basis that a joint domain shares.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing domain.")] = False,
    *,
    common: Opening,
) -> None:
    """Store an exported domain in this ecology, after checking all its files.

    covnorm import exported/flowers

    covnorm import exported/flowers --name flowers-b
    """
    ecology = common.ecology
    source = {"imported": str(folder.absolute())}
    name = import_domain(
        ecology,
        folder,
        name,
        replace=replace,
        basis=basis,
        source=source,
        check=check_servable,
    )
    entry = ecology.entry(name)
    value = {
        "domain": name,
        "source": source["imported"],
        "classes": entry.classes,
        "parameters": {"adapter": entry.parameters, "total": entry.total},
        "bytes": entry.bytes,
        "basis": entry.basis,
    }
    common.screen.result(
        value,
        f"imported {name}: {entry.classes} classes, {size(entry.bytes)}",
        f"its accuracy is unknown here; measure it: covnorm eval {name} IMAGES",
    )


def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DOMAIN…", autocompletion=domain_names, help="Names of the domains to remove."
        ),
    ],
    purge_: Annotated[
        bool,
        typer.Option(
            "--purge",
            help="Also delete earlier versions, unfinished work and decoded images. Cannot be "
            "undone.",
        ),
    ] = False,
    *,
    common: Common,
) -> None:
    """Remove domains. The others do not change by a single byte.

    covnorm remove flowers                 covnorm rollback flowers restores it

    covnorm remove flowers --purge
    """
    ecology = common.ecology
    if purge_:
        purge(ecology, names)
    else:
        ecology.remove(names)
    restorable = [name for name in names if name in ecology.versions]
    lines = [f"to restore: covnorm rollback {' '.join(restorable)}"] if restorable else []
    value = {"removed": names, "purged": purge_}
    common.screen.result(value, f"removed: {', '.join(names)}", *lines)


def history(
    name: Annotated[
        str,
        typer.Argument(
            metavar="DOMAIN",
            autocompletion=version_names,
            help="Name of a domain, also of a removed one.",
        ),
    ],
    *,
    common: Common,
) -> None:
    """List the versions of a domain that the ecology has: the current one and earlier ones.

    covnorm history flowers
    """
    versions = common.ecology.history(name)
    columns = ("version", "time", "", "method", "accuracy %", "file", "digest")
    rows = [
        (
            "current" if row["current"] else str(row["version"]),
            row["time"],
            row["what"],
            row["method"],
            row["accuracy"],
            size(row["bytes"]),
            row["digest"][:SHOWN],
        )
        for row in versions
    ]
    lines = []
    if not versions[0]["current"]:
        lines = [f"{name} was removed; to restore it: covnorm rollback {name}"]
    common.screen.result(versions, table("", columns, rows), *lines)


def rollback(
    names: Annotated[list[str], Restorable],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="N|DIGEST",
            help="Version of one domain: its number in history, or the first characters of its "
            "digest. Default: 1.",
        ),
    ] = None,
    *,
    common: Common,
) -> None:
    """Make an earlier version of a domain current, or restore a removed domain.

    The version that it replaces is kept: rollback undoes a rollback. Servers switch at once.

    covnorm rollback flowers

    covnorm rollback flowers --to 2

    covnorm rollback flowers birds         joint domains whose basis has changed, together
    """
    ecology = common.ecology
    ecology.rollback(names, to)
    value, lines = [], []
    for name in dict.fromkeys(names):
        current = ecology.history(name)[0]
        value.append({"domain": name, **current})
        accuracy = "" if current["accuracy"] is None else f", {current['accuracy']:.1f} %"
        what = " ".join(str(current[key]) for key in ("what", "time") if current[key])
        lines.append(f"{name} is now {current['digest'][:SHOWN]} ({what}{accuracy})")
    common.screen.result(value, *lines)


def gc(
    keep: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Also delete all but the last N earlier versions of every domain.",
        ),
    ] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Also delete decoded images.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be freed.")
    ] = False,
    always: Annotated[
        bool, typer.Option("--always", help="Keep no more than --keep from now on, too.")
    ] = False,
    *,
    common: Common,
) -> None:
    """Free disk space: versions of removed domains, and unfinished work.

    covnorm gc --dry-run

    covnorm gc --keep 1 --cache
    """
    ecology = common.ecology
    if always and keep is None:
        raise CovNormError("--always: give the number of versions to keep, too (--keep N)")
    done = collect_garbage(ecology, keep, cache, dry_run)
    if always and keep is not None and not dry_run:
        ecology.set_keep(keep)
    rows = [(KINDS[kind], size(freed)) for kind, freed in done["freed"].items()]
    common.screen.result(
        done,
        table("", ("would be freed" if dry_run else "freed", ""), rows),
        f"total: {size(done['total'])}",
        *(f"in use by another process, not freed: {what}" for what in done["in_use"]),
    )
