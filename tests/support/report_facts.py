"""Made-up facts for the report: usual, unusual and hostile."""

from __future__ import annotations

import io

import numpy as np

WIDTHS = [16, 24, 24, 40, 40, 80, 80, 80, 112, 112, 112, 192, 192, 192, 192, 320]
SITES = {f"blocks.{i}.conv_pwl": d for i, d in enumerate(WIDTHS)}
RA = sum(d * d for d in WIDTHS)
ATTACKS = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</title></style><b>&amp;",
    "{{ 7 * 7 }}{% raw %}",
    "$\\frac{1}{0}$",
    "猫と犬 🐈 قطة",
    "x" * 300,
    "not utf-8: \udcff, a bell: \x07",
]


def png(color: int = 90) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (28, 28), (color, 40, 200)).save(stream, "PNG")
    return stream.getvalue()


def spectra_of(d: int) -> dict[str, list[float]]:
    i = np.arange(d)
    x, y, A = np.exp(-9 * i / d), np.exp(-22 * i / d), np.exp(-2 * i / d)
    return {"x": x.tolist(), "y": y.tolist(), "A": A.tolist()}


def rank(values: list[float], t: float) -> int:
    """The paper's rule by hand: the smallest i with r_i > t."""
    total, so_far = sum(values), 0.0
    for i, value in enumerate(values, start=1):
        so_far += value
        if so_far / total > t:
            return i
    return len(values)


def domain(
    name: str = "digits",
    classes: int = 10,
    final: float | None = 95.6,
    sites: dict[str, int] = SITES,
) -> dict:
    """Return a covnorm domain as the ecology stores it."""
    names, t = [f"class {i}" for i in range(classes)], 0.9
    spectra = {site: spectra_of(d) for site, d in sites.items()}
    ranks = {site: [rank(s["x"], t), rank(s["y"], t)] for site, s in spectra.items()}
    adapter = sum(2 * sites[site] * min(pair) for site, pair in ranks.items())
    counts = {"adapter": adapter, "bias": 1808, "norm": 42000, "head": 1281 * classes}
    counts["total"] = sum(counts.values())
    confusion = np.eye(classes, dtype=int) * 45
    confusion[0, 1 % classes] += 5
    examples = [{"truth": names[0], "label": names[0], "probability": 0.98, "image": "000"}]
    examples += [{"truth": names[0], "label": names[-1], "probability": 0.61, "image": "001"}]
    balance = {c: 85 + i for i, c in enumerate(names)}
    return {
        "name": name,
        "classes": names,
        "preprocessing": {"size": 64, "mean": [0.5, 0.5, 0.5], "std": [0.2] * 3, "fit": "squash"},
        "basis": None,
        "method": "covnorm",
        "settings": {"method": "covnorm", "variance": t, "epochs": 6, "seed": 0, "augment": None},
        "source": {
            "path": "my images/",
            "digest": "9f2c7d1e5b3a4c60",
            "images": {"train": sum(balance.values()), "val": 150, "test": 500},
            "balance": {"train": balance, "test": dict.fromkeys(names, 50)},
            "unreadable": 1,
            "duplicates": 0,
        },
        "results": {
            "on": "test",
            "accuracy": {"before": 81.2, "adapted": 96.0, "compressed": 95.0, "final": final},
            "parameters": counts,
            "bytes": 301234,
            "dtype": "float16",
            "denominators": {"network": 4652008, "convolutions": 3284864, "ra": RA},
            "ranks": ranks,
            "widths": sites,
            "spectra": spectra,
            "seconds": {"train": 45.1, "collect": 3.0, "normalize": 0.4, "tune": 22.0},
            "confusion": confusion.tolist() if classes <= 100 else None,
            "examples": examples,
        },
        "history": [
            {"time": "2026-11-16T03:00:00Z", "what": "add", "method": "covnorm", "accuracy": final}
        ],
        "images": {"000": png(), "001": png(200)},
    }


def made_up(*domains: dict, bases: tuple = ()) -> dict:
    backbone = {"name": "efficientnet-lite0", "parameters": 4652008, "bytes": 18608032}
    backbone["fingerprint"] = "4be1d7a09c55e2f1"
    ecology = {"name": "house", "backbone": backbone, "made": "2026-11-16", "version": "0.1.0"}
    return {"ecology": ecology, "bases": list(bases), "domains": list(domains)}


def joint() -> dict:
    found = domain("letters")
    found |= {"method": "covnorm-joint", "basis": {"name": "joint", "fingerprint": "ab"}}
    found["results"]["parameters"] |= {"adapter": 9000, "shared": 244776}
    ranks = found["results"]["ranks"]
    basis = {"name": "joint", "parameters": 244776, "bytes": 489600, "ranks": ranks}
    return made_up(found, bases=({**basis, "domains": ["letters", "digits"]},))


def plain_method(method: str) -> dict:
    """Return a domain without A, ranks and compression."""
    found = domain(method)
    found |= {"method": method, "settings": {"epochs": 6}}
    found["results"] |= {"ranks": {}, "spectra": {}}
    found["results"]["parameters"] |= {"adapter": 0 if method == "bn" else 4652008}
    return made_up(found)


def bare_record() -> dict:
    """Return a domain with only the required values."""
    found = domain(final=None)
    found["results"]["accuracy"] = dict.fromkeys(("before", "adapted", "compressed", "final"))
    found["results"] |= {"examples": [], "confusion": None, "on": "val", "seconds": {}}
    found["source"] = {"images": {"train": 10}}
    found |= {"history": [], "images": {}, "preprocessing": None, "settings": {}}
    return made_up(found)


def hostile() -> dict:
    """Return facts in which every name is an attack or a nuisance."""
    domains = []
    for attack in ATTACKS:
        one = domain(classes=len(ATTACKS), sites={})
        one |= {"name": attack, "method": attack, "settings": {"variance": 0.9, attack: attack}}
        one |= {"classes": ATTACKS, "basis": {"name": attack, "fingerprint": ""}}
        one["source"] |= {"path": attack, "digest": attack}
        one["source"]["balance"] = {"train": dict.fromkeys(ATTACKS, 9)}
        one["history"] = [{"time": attack, "what": attack, "method": attack}]
        for i, example in enumerate(one["results"]["examples"]):
            example |= {"truth": ATTACKS[i], "label": ATTACKS[2 * i]}
        domains.append(one)
    sites = domain(sites=dict.fromkeys(ATTACKS, 16))["results"]
    domains[0]["results"] |= {part: sites[part] for part in ("ranks", "widths", "spectra")}
    basis = {"name": ATTACKS[0], "parameters": 5, "bytes": 9, "domains": ATTACKS, "ranks": {}}
    facts = made_up(*domains, bases=(basis,))
    facts["ecology"] |= {"name": ATTACKS[0], "made": ATTACKS[1], "version": ATTACKS[2]}
    facts["ecology"]["backbone"] |= {"name": ATTACKS[2], "fingerprint": ATTACKS[0]}
    return facts


CASES = {
    "four domains": lambda: made_up(*(domain(n) for n in ("digits", "fashion", "a", "b"))),
    "no domain": made_up,
    "one domain": lambda: made_up(domain()),
    "one class": lambda: made_up(domain(classes=1)),
    "130 domains": lambda: made_up(*(domain(f"domain-{i}", 3, sites={}) for i in range(130))),
    "50 classes": lambda: made_up(domain(classes=50)),
    "1000 classes": lambda: made_up(domain(classes=1000)),
    "bn": lambda: plain_method("bn"),
    "fnft": lambda: plain_method("fnft"),
    "joint": joint,
    "bare record": bare_record,
    "hostile": hostile,
}
