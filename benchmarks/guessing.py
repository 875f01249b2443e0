"""`auto`: how often the server picks the right domain, and notices that none fits.

    python -m benchmarks.guessing [--fresh]

The seven domains of the paper benchmark on EfficientNet-Lite0, with the residual adapters trained
there, not compressed. As with `covnorm add`, each domain keeps a dozen held-out images. The domain
of test images is guessed among all seven, and again without the right one, where the correct answer
is that none fits. Results are in results/guessing.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import torch_covnorm as cn
from torch_covnorm.data.images import fit_image
from torch_covnorm.ecology import Ecology
from torch_covnorm.ecology.measure import png
from torch_covnorm.ecology.store import Details
from torch_covnorm.serve.guess import Guesser

from .ledger import Ledger, Lines
from .paper.bench import PIXELS, Bench
from .serving import unmeasured

BACKBONE = "efficientnet-lite0"
SIZE, IMAGES, EXAMPLES = PIXELS[BACKBONE], 200, 12


def keep(ecology: Ecology, bench: Bench, domain: str) -> None:
    """Store a trained domain with its statistics."""
    net, name, data = bench.net, bench.trained(domain, 0), bench.data(domain)
    moments = cn.collect(net, name, bench.parts(domain)["plain"])
    net.copy_domain(name, domain)
    net.domain(domain).preprocessing = {
        **ecology.backbone["preprocessing"],
        "size": SIZE,
        "fit": "squash",
    }
    examples = {f"{i:03}": png(image) for i, image in enumerate(data.x_val[:EXAMPLES])}
    ecology.put(net, {domain: Details(unmeasured("ra"), moments=moments, examples=examples)})


def measure(guesser: Guesser, bench: Bench, domain: str) -> dict[str, Any]:
    """Return the percentages of a domain's test images: right; refused; refused without it."""
    images = bench.data(domain).x_test[:IMAGES]
    sizes = dict.fromkeys(bench.domains, SIZE)
    named: Counter[str] = Counter()
    fits = left_out = 0
    for image in images:
        found = guesser.guess(sizes, {SIZE: fit_image(image, SIZE).numpy()})
        named[found[0]["domain"]] += 1
        fits += found[0]["fits"]
        left_out += next(f["fits"] for f in found if f["domain"] != domain)
    share = 100 / len(images)
    return {
        "images": len(images),
        "right": share * named[domain],
        "refused": share * (len(images) - fits),
        "refused_without_it": share * (len(images) - left_out),
        "named": dict(named.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true")
    ledger = Ledger("guessing", parser.parse_args().fresh)
    bench = Bench(BACKBONE, Lines("paper"))
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        ecology = Ecology.create(Path(place) / "house", BACKBONE)
        guesser = Guesser(ecology)
        if any(domain not in ledger.entries for domain in bench.domains):
            with torch.inference_mode(False):
                for domain in bench.domains:
                    keep(ecology, bench, domain)
            guesser.learn(dict.fromkeys(bench.domains, "1"))
        for domain in bench.domains:
            ledger.run(domain, lambda d=domain: measure(guesser, bench, d))
    print("| domain | images | right | refused | refused without its own domain |")
    print("|---|---|---|---|---|")
    for domain, e in ledger.entries.items():
        shares = (f"{e[k]:.1f} %" for k in ("right", "refused", "refused_without_it"))
        print("|", " | ".join([domain, str(e["images"]), *shares]), "|")


if __name__ == "__main__":
    main()
