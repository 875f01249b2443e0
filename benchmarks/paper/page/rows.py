"""Rows by their exact key. A key leaves out where a row was measured: domain, images and seed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch_covnorm as cn

from ...domains import DOMAINS
from ..settings import EPOCHS, LONGER, WHOLE, kind, rate

# All that tells one experiment from another; a key that a row lacks counts as None.
FIELDS = (
    *("backbone", "method", "way", "share", "ratio", "sharing", "tuned"),
    *("lr", "epochs", "options"),
)
Key = Mapping[str, Any]
Row = Mapping[str, Any]
NAMES = {
    "fnft": "FNFT",
    "bn": "BN",
    "lwf": "LwF",
    "ra": "RA",
    "parallel": "parallel RA",
    "dan": "DAN",
    "svd": "SVD",
    "svd-fta": "SVD+FTA",
    "fta": "FTA",
    "pca-fta": "PCA+FTA",
    "piggyback": "Piggyback",
    "covnorm": "CovNorm",
    "covnorm-identity": "CovNorm from the identity as M",
    "covnorm-random": "CovNorm from a random M",
    "joint-svd": "joint SVD",
    "covnorm-joint": "joint CovNorm",
}


class Rows:
    """The rows of a file, of each domain those of the images that were measured last."""

    def __init__(self, rows: Iterable[Row], domains: Sequence[str] = DOMAINS) -> None:
        rows = list(rows)
        newest = {r["domain"]: r["images"] for r in rows}
        self.all = [r for r in rows if r["images"] == newest[r["domain"]]]
        self.left_out, self.domains = len(rows) - len(self.all), tuple(domains)
        self._found: dict[str, dict[tuple[str, int], Row]] = {}
        for row in self.all:
            # The first of two equal ones counts, as when the benchmark looks for it.
            self._found.setdefault(_text(row), {}).setdefault((row["domain"], row["seed"]), row)

    def of(self, key: Key) -> dict[tuple[str, int], Row]:
        """{(domain, seed): row} with exactly this key, of the page's domains."""
        found = self._found.get(_text(key), {})
        return {place: row for place, row in found.items() if place[0] in self.domains}

    def values(self, key: Key, *path: str) -> dict[str, dict[int, float]]:
        """{domain: {seed: number}}: the accuracy, or what `path` leads to."""
        values: dict[str, dict[int, float]] = {}
        for (domain, seed), row in self.of(key).items():
            value: Any = row
            for step in path or ("accuracy",):
                value = value.get(step) if value is not None else None
            if value is not None:
                values.setdefault(domain, {})[seed] = value
        return values

    def count(self, keys: Iterable[Key]) -> int:
        """How many rows have one of these keys."""
        return sum(len(self.of(key)) for key in keys)

    def mean(self, key: Key, field: str) -> float | None:
        """Of a field over all rows; what several domains share counts in equal parts."""
        rows = self.of(key).values()
        shares = [(row.get("shared") or 0) / (sharing(row) or 1) for row in rows]
        extra = shares if field in ("parameters", "total") else [0.0] * len(shares)
        known = [row[field] + more for row, more in zip(rows, extra, strict=True) if field in row]
        return statistics.fmean(known) if known else None


def sharing(row: Row) -> int | None:
    """How many domains a row's method put on one basis."""
    return row.get("sharing") or (row.get("options") or {}).get("sharing")


def _text(row: Key) -> str:
    return json.dumps({f: row.get(f) for f in FIELDS}, sort_keys=True)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────


def cell(
    backbone: str,
    method: str,
    options: Mapping[str, Any] | None = None,
    *,
    lr: float | None = None,
    epochs: int | None = None,
    domains: int = len(DOMAINS),
) -> dict[str, Any]:
    """The key of `Bench.cell`, or of `Bench.together` for a method that `domains` share."""
    options = {**(options or {}), **({"sharing": domains} if cn.METHODS[method].joint else {})}
    key = {
        "backbone": backbone,
        "method": method,
        "lr": lr or rate(backbone, kind(method, options)),
    }
    return {**key, "epochs": epochs or WHOLE, "options": options}


def start(backbone: str, lr: float | None = None) -> dict[str, Any]:
    """The key of the A that the compressed methods start from: RA after fewer epochs."""
    return cell(backbone, "ra", lr=lr, epochs=EPOCHS)


def cut(
    backbone: str, way: str, share: int, tuned: bool, lr: float | None = None
) -> dict[str, Any]:
    """The key of a cut to 1/share of A's parameters."""
    key = {"backbone": backbone, "method": "cut", "way": way, "share": share, "tuned": tuned}
    return {**key, "lr": lr or rate(backbone, f"cut-{way}")} if tuned else key


def adapters(found: Rows, backbone: str) -> float | None:
    """The parameters of whole residual adapters, however long they were trained."""
    sizes = (found.mean(key, "parameters") for key in (start(backbone), cell(backbone, "ra")))
    return next((size for size in sizes if size), None)


def longer(backbone: str) -> dict[str, Any]:
    """The key of RA trained for more epochs."""
    return cell(backbone, "ra", epochs=LONGER)


def said(key: Key) -> str:
    """A key as its lines spell it, so that it can be searched for."""
    return json.dumps({k: v for k, v in key.items() if k != "backbone"}, ensure_ascii=False)[1:-1]
