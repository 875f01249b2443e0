"""What the report says about one domain."""

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
PARTS = {
    "adapter": "adapter matrices",
    "mask": "masks, 1 bit per weight, in units of 32 bits",
    "bias": "adapter biases",
    "norm": "norms",
    "head": "head",
    "own": "extra module",
}
# Defaults for what a record may lack.
SOURCE: dict[str, Any] = {"path": None, "digest": None, "unreadable": 0, "duplicates": 0}
EVENT = dict.fromkeys(("time", "what", "method", "accuracy", "parameters", "bytes"))
SPLITS = {"train": "training", "val": "validation", "test": "test"}
# Settings that are options of `covnorm add`; the others are passed by --set.
FLAGS = ("variance", "max_drop", "epochs", "lr", "norms", "batch", "seed", "dtype")


def row_of(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a domain's row in the table. Fine-tuned copies and masks count as adapters."""
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
        "denominators": results["denominators"],
        "bytes": results["bytes"],
        "basis": (record.get("basis") or {}).get("name"),
    }


def details_of(record: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the domain's own section shows; ids begin with the row's key."""
    results, method = record["results"], METHODS.get(record["method"])
    counts, key = results["parameters"], row["key"]
    settings = {k: v for k, v in record["settings"].items() if v is not None and k != "method"}
    preprocessing = record.get("preprocessing")
    if not isinstance(preprocessing, dict):  # a user may have stored any JSON value
        preprocessing = {}
    return {
        **row,
        "summary": method and method.summary,
        "source": {**SOURCE, **record["source"]},
        "preprocessing": preprocessing,
        "error": _standard_error(row["accuracy"]["final"], row["images"]),
        "chance": _chance(record),
        "balance": _balance(record),
        "ranks": _ranks(results, key),
        "spectra": _spectra(results, settings.get("variance"), key),
        "parts": _parts(counts),
        "total": counts["total"],
        "shared": counts.get("shared", 0),
        "dtype": results["dtype"],
        "storage": results.get("storage") or {},
        "declined": bool(results.get("declined")),
        "confusion": _confusion(record, key),
        "examples": _examples(record),
        "history": [{**EVENT, **event} for event in record.get("history") or ()],
        "settings": {
            k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
            for k, v in settings.items()
        },
        "command": _command(record, settings, preprocessing),
        "seconds": results.get("seconds") or {},
    }


def _standard_error(accuracy: float | None, images: int | None) -> float | None:
    """Return sqrt(p (1 - p) / n), in points."""
    if accuracy is None or not images:
        return None
    return 100 * math.sqrt(accuracy / 100 * (1 - accuracy / 100) / images)


def _chance(record: Mapping[str, Any]) -> float | None:
    """Return the share of the most frequent class, in percent: one answer for all images."""
    counts = record["source"].get("balance", {}).get(record["results"]["on"]) or {}
    return 100 * max(counts.values()) / sum(counts.values()) if sum(counts.values()) else None


def _balance(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the images per class; of many classes, only the largest and the smallest."""
    splits = {split: n for split, n in record["source"].get("balance", {}).items() if n}
    rows = [(name, [n.get(name, 0) for n in splits.values()]) for name in record["classes"] or ()]
    if not splits or not rows:
        return None
    first = [counts[0] for _, counts in rows]
    left_out = len(rows) - NAMED if len(rows) > NAMED + 4 else 0
    if left_out:
        rows.sort(key=lambda row: -row[1][0])
        rows = rows[: NAMED // 2] + rows[-(NAMED // 2) :]
    return {
        "splits": list(splits),
        "rows": rows,
        "left_out": left_out,
        "cut": NAMED // 2,
        "least": min(first),
        "most": max(first),
    }


def _ranks(results: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    ranks, widths = results.get("ranks") or {}, results.get("widths") or {}
    if not ranks:
        return None
    rows = [
        {"site": site, "d": widths[site], "kx": kx, "ky": ky, "eta": ky / kx if kx else None}
        for site, (kx, ky) in ranks.items()
    ]
    d, kx, ky, eta = ([row[name] for row in rows] for name in ("d", "kx", "ky", "eta"))
    known = [row for row in rows if row["eta"] is not None]
    span = f"kx from {min(kx)} to {max(kx)}, ky from {min(ky)} to {max(ky)}"
    listed = ", ".join(f"{row['eta']:.2f}" for row in known)
    return {
        "rows": rows,
        "lowest": min(known, key=lambda row: row["eta"], default=None),
        "below_one": sum(row["eta"] < 1 for row in known),
        "figure": figures.ranks(d, kx, ky, f"Ranks of {len(rows)} layers: {span}", f"{key}r"),
        "ratios": figures.ratios(eta, f"Ratio ky/kx by layer: {listed}", f"{key}e"),
    }


def _spectra(results: Mapping[str, Any], t: Any, key: str) -> dict[str, Any] | None:
    """Return the spectra of the first, the middle and the last site that have one."""
    spectra, ranks = results.get("spectra") or {}, results.get("ranks") or {}
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
        kept = dict(zip("xy", ranks.get(site, ()), strict=False))
        needs = {
            n: by_variance(torch.tensor(values[n], dtype=torch.float64), threshold) for n in curves
        }
        listed = ", ".join(f"{k} for {name}" for name, k in needs.items())
        label = f"Directions for {100 * threshold:g} percent of the variance at {site}: {listed}"
        panels.append(
            {
                "site": site,
                "needs": needs,
                "sizes": {name: len(values[name]) for name in curves},
                "figure": figures.spectrum(curves, kept, threshold, label, f"{key}s{i + 1}"),
            }
        )
    return {"panels": panels, "t": 100 * threshold, "given": threshold == t}


def _parts(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (part, parameters), the known parts first, without those that are zero."""
    names = [*PARTS, *(k for k in counts if k not in (*PARTS, "total", "shared"))]
    return [(PARTS.get(k, k), counts[k]) for k in names if counts.get(k)]


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
    worst = np.argsort(-mistakes, axis=None, kind="stable")[:5]
    pairs = zip(*np.unravel_index(worst, counts.shape), strict=True)
    rows = figure = None
    if len(names) <= NUMBERED:
        shades = np.sqrt(shares).round(2).tolist()
        cells = map(zip, counts.tolist(), shades)
        rows = list(zip(names, cells, strict=True))
    else:
        right = 100 * np.trace(counts) / max(counts.sum(), 1)
        label = f"Confusion matrix of {len(names)} classes; {right:.1f} percent on the diagonal"
        figure = figures.heat_map(shares, label, f"{key}c")
    return {
        "worst": [(names[i], names[j], counts[i, j], sums[i]) for i, j in pairs if mistakes[i, j]],
        "names": names,
        "long": any(len(name) > 3 for name in names),
        "rows": rows,
        "figure": figure,
    }


def _examples(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    images, examples = record.get("images") or {}, []
    for example in (record["results"].get("examples") or [])[:SHOWN]:
        png = images.get(example["image"])
        link = png and f"data:image/png;base64,{base64.b64encode(png).decode()}"
        right = example["truth"] == example["label"]
        examples.append({"probability": None, **example, "right": right, "link": link})
    return examples


def _command(
    record: Mapping[str, Any], settings: Mapping[str, Any], preprocessing: Mapping[str, Any]
) -> str | None:
    """Return the `covnorm add` that makes the domain again; None if another way made it."""
    folder = record["source"].get("path")
    if record.get("basis") or not folder or "augment" in settings:
        return None
    words = ["covnorm", "add", record["name"], folder, "--method", record["method"]]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag, str(value)] if name in FLAGS else ["--set", f"{name}={json.dumps(value)}"]
    for name in ("size", "fit"):
        words += [f"--{name}", str(preprocessing[name])] if name in preprocessing else []
    words += ["--background", str(preprocessing.get("background") or "none")]
    return shlex.join(words)
