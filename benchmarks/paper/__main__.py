"""The paper on real data.

python -m benchmarks.paper quick    two domains, one seed, key methods; ends with the table
python -m benchmarks.paper full     everything, over several hours; or one piece of it by its name
python -m benchmarks.paper page     docs/results.md and .html from what was measured

Each result is kept as it comes, and what is there is not run again: stop it when you like.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import domains, originals
from ..ledger import Lines
from . import profiles
from .pretraining import origin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("quick", "full", "page", *profiles.PIECES))
    parser.add_argument(
        "--data", type=Path, help="a folder with the paper's own datasets, to use instead of ours"
    )
    parser.add_argument("--fresh", action="store_true", help="quick: measure anew what is there")
    args = parser.parse_args()
    if args.what == "page":
        from .page import write

        write()
    elif args.what == "quick":
        from .page.tables import table1

        lines = Lines("quick", args.fresh)
        bench = profiles.quick(lines, args.data)
        print(table1(lines.rows, profiles.two(bench)))
    else:
        lines = Lines("paper" if args.data is None else "originals")
        for piece in profiles.PIECES if args.what == "full" else (args.what,):
            profiles.piece(piece, lines, args.data)
        for table in _ending(lines.rows, args.data):
            print(table)


def _ending(rows: list[dict[str, Any]], folder: Path | None) -> Iterator[str]:
    """Table 1 of ours, or of the folder's datasets; and Table 2 of the folder's Decathlon."""
    from .page import decathlon
    from .page.rows import Rows
    from .page.tables import table1

    if names := domains.DOMAINS if folder is None else tuple(originals.folders(folder)):
        yield table1(rows, names)
    if folder is not None and (archive := originals.archive_in(folder)):
        yield decathlon.table(Rows(rows, archive.datasets), origin(archive)).markdown()


if __name__ == "__main__":
    main()
