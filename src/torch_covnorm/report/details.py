"""What the report says of one domain."""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..methods.recipes import METHODS
from ..stats.ranks import by_variance
from . import figures

NAMED = 16  # classes that the balance lists by name
NUMBERED = 20  # classes up to which the confusion matrix is a table of numbers
SHOWN = 24  # example images of a domain
THRESHOLD = 0.99  # the paper's t, for domains that were made without one
STAGES = {
    "before": "before, linear head",
    "adapted": "adapted",
    "compressed": "compressed, not tuned",
    "final": "final, as stored",
}
KINDS = {
    "adapter": "adapter matrices",
    "mask": "masks, 1 bit a weight, in units of 32 bits",
    "bias": "biases of the adapters",
    "norm": "norms",
    "head": "head",
    "own": "a module of its own",
}
# What a record may lack.
SOURCE: dict[str, Any] = {"path": None, "digest": None, "unreadable": 0, "duplicates": 0}
EVENT = dict.fromkeys(("time", "what", "method", "accuracy", "parameters", "bytes"))
EXAMPLE = dict.fromkeys(("truth", "label", "probability", "image"))
SPLITS = {"train": "training", "val": "validation", "test": "test"}
# Options of `covnorm add` by these names; it takes any other setting by --set.
FLAGS = ("variance", "max_drop", "epochs", "lr", "norms", "batch", "seed", "dtype")


def row_of(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A domain in the table: a fine-tuned copy and a mask are adapters too, as in `account`."""
    results = record["results"]
    counts, on = results["parameters"], results["on"]
    return {
        "key": key,
        "name": record["name"],
        "method": record["method"],
        "classes": len(record["classes"] or ()),
        "on": on,
        "images": record["source"]["images"].get(on),
        "accuracy": {stage: results["accuracy"].get(stage) for stage in STAGES},
        "adapter": counts["adapter"] + counts.get("mask", 0),
        "masked": bool(counts.get("mask")),
        "network": results["denominators"]["network"],
        "ra": results["denominators"]["ra"],
        "bytes": results["bytes"],
        "backbone_bytes": results["backbone_bytes"],
        "basis": (record.get("basis") or {}).get("name"),
    }


def details_of(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """All that its part of the page says; `key` begins the ids of its figures."""
    results = record["results"]
    row = row_of(record, key)
    final, images = row["accuracy"]["final"], row["images"]
    error = None
    if final is not None and images:
        error = 100 * math.sqrt(final / 100 * (1 - final / 100) / images)
    known = METHODS.get(record["method"])
    return {
        **row,
        "summary": known.summary if known else None,
        "source": {**SOURCE, **record["source"]},
        "preprocessing": _inputs(record),
        "error": error,
        "chance": _chance(record),
        "balance": _balance(record),
        "ranks": _ranks(results, key),
        "spectra": _spectra(record, key),
        "parts": _parts(results["parameters"]),
        "total": results["parameters"]["total"],
        "shared": results["parameters"].get("shared", 0),
        "denominators": results["denominators"],
        "dtype": results["dtype"],
        "storage": results.get("storage") or {},
        "declined": bool(results.get("declined")),
        "confusion": _confusion(record, key),
        "examples": _examples(record),
        "history": [{**EVENT, **event} for event in record.get("history") or ()],
        "settings": {k: _plain(v) for k, v in _settings(record).items()},
        "command": _command(record),
        "seconds": results.get("seconds") or {},
    }


def _chance(record: Mapping[str, Any]) -> float | None:
    """Accuracy of one answer for all: the share of the most frequent class, in percent."""
    counts = record["source"].get("balance", {}).get(record["results"]["on"]) or {}
    return 100 * max(counts.values()) / sum(counts.values()) if sum(counts.values()) else None


def _balance(record: Mapping[str, Any]) -> dict[str, Any]:
    """Images a class: all of them, or the largest and the smallest where there are many."""
    splits = {s: c for s, c in record["source"].get("balance", {}).items() if c}
    first: Mapping[str, int] = next(iter(splits.values()), {})
    classes = record["classes"] or ()
    rows: list[dict[str, Any]] = [
        {"name": name, "counts": [counts.get(name, 0) for counts in splits.values()]}
        for name in classes
    ]
    most = max(first.values(), default=0)
    for row in rows:
        row["width"] = 100 * row["counts"][0] / most if most else 0
    left_out = max(0, len(rows) - NAMED) if len(rows) > NAMED + 4 else 0
    if left_out:
        rows.sort(key=lambda r: -r["counts"][0] if splits else 0)
        rows = rows[: NAMED // 2] + rows[-(NAMED // 2) :]
    return {
        "splits": list(splits),
        "rows": rows,
        "left_out": left_out,
        "cut": NAMED // 2,
        "least": min((first.get(name, 0) for name in classes), default=0),
        "most": most,
    }


def _ranks(results: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    ranks, widths = results.get("ranks") or {}, results.get("widths") or {}
    if not ranks:
        return None
    rows = [
        {"site": site, "d": widths[site], "kx": kx, "ky": ky, "eta": ky / kx if kx else None}
        for site, (kx, ky) in ranks.items()
    ]
    d, kx, ky = ([row[name] for row in rows] for name in ("d", "kx", "ky"))
    known = [row for row in rows if row["eta"] is not None]
    lowest = min(known, key=lambda row: row["eta"], default=None)
    span = f"kx from {min(kx)} to {max(kx)}, ky from {min(ky)} to {max(ky)}"
    etas = ", ".join(f"{row['eta']:.2f}" for row in known)
    return {
        "rows": rows,
        "lowest": lowest,
        "below_one": sum(row["eta"] < 1 for row in known),
        "figure": figures.ranks(d, kx, ky, f"Ranks of {len(rows)} layers: {span}", f"{key}r"),
        "ratios": figures.ratios(
            [row["eta"] for row in rows], f"Ratio ky/kx by layer: {etas}", f"{key}e"
        ),
    }


def _spectra(record: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """The first, the middle and the last site that have a spectrum."""
    results, t = record["results"], record["settings"].get("variance")
    spectra = results.get("spectra") or {}
    sites = list(spectra)
    if not sites:
        return None
    threshold = t if isinstance(t, int | float) and 0 < t <= 1 else THRESHOLD
    panels = []
    for i in sorted({0, len(sites) // 2, len(sites) - 1}):
        site = sites[i]
        # x and y have variances; the square of A's singular values is y's variance for white x.
        values = {**spectra[site], "A": [s * s for s in spectra[site]["A"]]}
        curves = {name: figures.curve(values[name]) for name in ("x", "y", "A")}
        kept = dict(zip("xy", (results.get("ranks") or {}).get(site, ()), strict=False))
        needs = {
            n: by_variance(torch.tensor(values[n], dtype=torch.float64), threshold) for n in curves
        }
        about = f"Variance explained at {site}: {_said_needs(needs, threshold)}"
        panels.append(
            {
                "site": site,
                "needs": needs,
                "sizes": {name: len(values[name]) for name in curves},
                "figure": figures.spectrum(curves, kept, threshold, about, f"{key}s{i + 1}"),
            }
        )
    return {"panels": panels, "t": 100 * threshold, "given": threshold == t}


def _said_needs(needs: Mapping[str, int], t: float) -> str:
    parts = ", ".join(f"{k} for {name}" for name, k in needs.items())
    return f"directions for {100 * t:g} percent of the variance: {parts}"


def _parts(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Parameters by kind, the known kinds in their order, what is zero left out."""
    names = [*KINDS, *(k for k in counts if k not in (*KINDS, "total", "shared"))]
    return [(KINDS.get(k, k), counts[k]) for k in names if counts.get(k)]


def _confusion(record: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    table, names = record["results"].get("confusion"), record["classes"]
    if not table:
        return None
    counts = np.array(table, dtype=np.int64)
    if counts.shape != (len(names), len(names)):
        raise ValueError(f"confusion is {counts.shape} for {len(names)} classes")
    sums = counts.sum(1)
    shares = counts / np.maximum(sums, 1)[:, None]
    mistakes = counts - np.diag(np.diag(counts))
    order = np.argsort(-mistakes, axis=None, kind="stable")[:5]
    pairs = [divmod(int(i), len(names)) for i in order]
    found: dict[str, Any] = {
        "worst": [(names[i], names[j], counts[i, j], sums[i]) for i, j in pairs if mistakes[i, j]],
        "names": names,
        "long": any(len(name) > 3 for name in names),
        "rows": None,
        "figure": None,
    }
    if len(names) <= NUMBERED:
        cells = [
            [(n, round(float(s) ** 0.5, 2)) for n, s in zip(*row, strict=True)]
            for row in zip(counts.tolist(), shares, strict=True)
        ]
        found["rows"] = list(zip(names, cells, strict=True))
    else:
        right = 100 * np.diag(counts).sum() / max(counts.sum(), 1)
        about = f"Confusion matrix of {len(names)} classes; {right:.1f} percent on the diagonal"
        found["figure"] = figures.heat_map(shares, about, f"{key}c")
    return found


def _examples(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    images = record.get("images") or {}
    found = []
    for example in (record["results"].get("examples") or [])[:SHOWN]:
        data = images.get(example["image"])
        link = None if data is None else f"data:image/png;base64,{base64.b64encode(data).decode()}"
        right = example["truth"] == example["label"]
        found.append({**EXAMPLE, **example, "right": right, "link": link})
    return found


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, the method apart."""
    given: Mapping[str, Any] = record["settings"]
    return {k: v for k, v in given.items() if v is not None and k != "method"}


def _command(record: Mapping[str, Any]) -> str | None:
    """The `covnorm add` that makes the domain again; None for one that it did not make."""
    given, folder, inputs = _settings(record), record["source"].get("path"), _inputs(record)
    if record.get("basis") or not folder or "augment" in given:
        return None
    words = ["covnorm", "add", record["name"], folder, "--method", record["method"]]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag, str(value)] if name in FLAGS else ["--set", f"{name}={json.dumps(value)}"]
    for name in ("size", "fit"):
        words += [f"--{name}", str(inputs[name])] if name in inputs else []
    return shlex.join(words)


def _inputs(record: Mapping[str, Any]) -> dict[str, Any]:
    found = record.get("preprocessing")  # any JSON value, a dictionary where we made it
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
