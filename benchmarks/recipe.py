"""Run the recipe and save its table as JSON: ``python -m benchmarks.recipe``."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from .ledger import RESULTS

RECIPE = Path(__file__).parents[1] / "recipes" / "one_domain.py"


def main() -> None:
    rows = runpy.run_path(str(RECIPE))["main"]()
    found = {stage: {"accuracy": percent, **count} for stage, percent, count in rows}
    (RESULTS / "recipe.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
