"""Result rows looked up by key; see `keys`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..domains import DOMAINS
from .keys import FIELDS

Key = Mapping[str, Any]
Row = Mapping[str, Any]


class Rows:
    """The rows of a file; for each domain, only those of the images measured last."""

    def __init__(self, rows: Iterable[Row], domains: Sequence[str] = DOMAINS) -> None:
        rows = list(rows)
        newest = {r["domain"]: r["images"] for r in rows}
        self.all = [r for r in rows if r["images"] == newest[r["domain"]]]
        self.left_out, self.domains = len(rows) - len(self.all), tuple(domains)
        self._by_key: dict[str, dict[tuple[str, int], Row]] = {}
        for row in self.all:
            # Of two equal rows the first counts, as in `Lines.find`.
            self._by_key.setdefault(_text(row), {}).setdefault((row["domain"], row["seed"]), row)

    def of(self, key: Key) -> dict[tuple[str, int], Row]:
        """Return {(domain, seed): row} of the rows with exactly this key, on the page's domains."""
        rows = self._by_key.get(_text(key), {})
        return {place: row for place, row in rows.items() if place[0] in self.domains}

    def values(self, key: Key, *path: str) -> dict[str, dict[int, float]]:
        """Return {domain: {seed: number}} of the accuracy, or of the field that `path` leads to."""
        values: dict[str, dict[int, float]] = {}
        for (domain, seed), row in self.of(key).items():
            value: Any = row
            for step in path or ("accuracy",):
                value = value.get(step) if value is not None else None
            if value is not None:
                values.setdefault(domain, {})[seed] = value
        return values

    def count(self, keys: Iterable[Key]) -> int:
        """Return how many rows have one of these keys."""
        return sum(len(self.of(key)) for key in keys)

    def mean(self, key: Key, field: str) -> float | None:
        """Return a field's mean over all rows; shared parameters count in equal parts."""
        known = []
        for row in self.of(key).values():
            sharing = row.get("sharing") or (row.get("options") or {}).get("sharing") or 1
            part = (row.get("shared") or 0) / sharing if field in ("parameters", "total") else 0
            known += [row[field] + part] if field in row else []
        return statistics.fmean(known) if known else None

    def common(self, *keys: Key) -> Rows:
        """Return the rows of these keys on the domains and seeds that all of them have."""
        found = [self.of(key) for key in keys]
        places = set.intersection(*map(set, found))
        return Rows([r for of in found for p, r in of.items() if p in places], self.domains)

    def present(self) -> list[str]:
        """Return the domains that have rows."""
        return [d for d in self.domains if any(row["domain"] == d for row in self.all)]

    def only_seed(self, seed: int, domains: Sequence[str] | None = None) -> Rows:
        """Return the rows of one seed, on these domains or on all of the page."""
        return Rows([r for r in self.all if r["seed"] == seed], domains or self.domains)


def _text(row: Key) -> str:
    return json.dumps({f: row.get(f) for f in FIELDS}, sort_keys=True)
