"""The paper's experiments on real data.

python -m benchmarks.paper quick    two domains, one seed, key methods; ends with Table 1
python -m benchmarks.paper full     everything, several hours; or one piece, by its name
python -m benchmarks.paper page     write docs/results.md from the results

Each result is saved as soon as it is measured, and existing results are not measured again: you can
stop at any time and continue with the same command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_covnorm.errors import CovNormError

from .. import domains, originals
from ..ledger import Lines
from . import profiles
from .rows import Rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("quick", "full", "page", *profiles.PIECES))
    parser.add_argument(
        "--data", type=Path, help="folder with the paper's datasets, to use instead of ours"
    )
    parser.add_argument("--fresh", action="store_true", help="quick: discard existing results")
    args = parser.parse_args()
    try:
        _run(args.what, args.data, args.fresh)
    except CovNormError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _run(what: str, folder: Path | None, fresh: bool) -> None:
    if what == "page":
        from .page import write

        write()
    elif what == "quick":
        lines = Lines("quick", fresh)
        bench = profiles.quick(lines, folder)
        for text in _tables("table1", "sizes", rows=Rows(lines.rows, profiles.two(bench))):
            print(text)
    else:
        lines = Lines("paper" if folder is None else "originals")
        for piece in profiles.full(folder) if what == "full" else (what,):
            profiles.piece(piece, lines, folder)
        for text in _ending(lines.rows, folder):
            print(text)


def _ending(rows: list[dict[str, Any]], folder: Path | None) -> Iterator[str]:
    """Yield Tables 1 and 2, as far as they were run."""
    names = domains.DOMAINS if folder is None else tuple(originals.folders(folder))
    archive = None if folder is None else originals.archive_in(folder)
    if any(r["backbone"] == "vgg16" for r in rows):
        yield from _tables("table1", "sizes", rows=Rows(rows, names))
    if any(r["backbone"] == "resnet26" for r in rows):
        found = Rows(rows, names if archive is None else archive.names)
        yield from _tables("table2", rows=found, archive=archive)


def _tables(*names: str, **context: Any) -> Iterator[str]:
    """Yield parts of the page for the terminal."""
    from .page import section  # needs matplotlib and Jinja

    for name in names:
        yield section(name, brief=True, **context)


if __name__ == "__main__":
    main()
