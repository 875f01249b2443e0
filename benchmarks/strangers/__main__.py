"""Compare `covnorm add` with its neighbours on data sets that nothing here knows.

    python -m benchmarks.strangers [--only letters,icons] [--methods covnorm,probe,finetune,lora]
                                   [--sizes 20,50,200] [--backbones efficientnet-lite0]
    python -m benchmarks.strangers table

Every cell appends a line to benchmarks/results/strangers.jsonl; an interrupted run resumes. `table`
prints the tables and writes them to docs/strangers.md.
"""

from __future__ import annotations

import argparse
import sys

from torch_covnorm.errors import CovNormError, choices

from ..ledger import Lines
from .cells import METHODS, run
from .folders import SIZES, folder
from .readers import STRANGERS

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", default="run", choices=("run", "table", "data"))
    parser.add_argument("--only", default=",".join(STRANGERS), help="data sets")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="images per class")
    parser.add_argument("--backbones", default="efficientnet-lite0")
    options = parser.parse_args()
    lines = Lines("strangers")
    try:
        if options.what == "table":
            from .page import DOCS, render, tables  # needs the extra `report`

            print(tables(lines.rows))
            DOCS.write_text(render(DOCS.read_text(), lines.rows))
            return
        datasets = chosen(options.only, STRANGERS)
        methods = chosen(options.methods, METHODS)
        sizes = [int(s) for s in chosen(options.sizes, map(str, SIZES))]
        for size in sizes:
            for dataset in datasets:
                if options.what == "data":
                    print(dataset, size, folder(dataset, size) or "too few images")
                    continue
                for backbone in options.backbones.split(","):
                    for method in methods:
                        cell(lines, dataset, size, backbone, method)
    except CovNormError as error:
        sys.exit(str(error))


def chosen(text: str, known: object) -> list[str]:
    """Return the names in a list with commas, all of them known."""
    names = list(known)  # type: ignore[call-overload]
    for name in text.split(","):
        if name not in names:
            raise CovNormError(f"{name!r}: {choices(name, names)}")
    return text.split(",")


def cell(lines: Lines, dataset: str, size: int, backbone: str, method: str) -> None:
    """Run a cell that has no row yet, if the data set has so many images."""
    key = {"method": method, "domain": dataset, "size": size, "backbone": backbone, "seed": SEED}
    if lines.find(**key) is None and (images := folder(dataset, size)):
        print(*key.values(), end=" … ", flush=True)
        row = lines.add({**key, **run(method, images, backbone)})
        print(f"{row['accuracy']:.1f} % in {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
