"""The score of the Visual Decathlon (Rebuffi et al. 2017).

``S = sum_d 1000 (max(0, Emax_d - E_d) / Emax_d)^2`` with ``Emax_d`` twice the baseline's error.
Per domain, the baseline gets 250 points and a perfect classifier 1000.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from ..errors import CovNormError, choices
from .annotations import File, read_annotations, read_predictions

# Test accuracy in percent of a network fine-tuned for each domain (Rebuffi et al. 2017).
BASELINES = {
    "imagenet12": 59.87,
    "aircraft": 60.34,
    "cifar100": 82.12,
    "daimlerpedcls": 92.82,
    "dtd": 55.53,
    "gtsrb": 97.53,
    "vgg-flowers": 81.41,
    "omniglot": 87.69,
    "svhn": 96.55,
    "ucf101": 51.20,
}


def decathlon_score(
    accuracies: Mapping[str, float], *, baselines: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return ``{"total": S, "points": {domain: points}}`` from test accuracies in percent.

    With only some of the ten domains, the total is over those and cannot be compared with published
    scores. `baselines` (accuracies in percent) applies the formula to other domains.
    """
    known = BASELINES if baselines is None else baselines
    if not isinstance(accuracies, Mapping) or not accuracies:
        raise CovNormError("no accuracies: pass {domain: accuracy in percent}")
    points = {}
    for domain, accuracy in accuracies.items():
        if domain not in known:
            raise CovNormError(f"no baseline for domain {domain!r}: {choices(domain, known)}")
        error = 100 - _percent(accuracy, f"accuracy of {domain!r}")
        worst = 2 * (100 - _percent(known[domain], f"baseline of {domain!r}"))
        if worst == 0:
            raise CovNormError(f"baseline of {domain!r} is 100: must be below 100")
        points[domain] = 1000 * (max(0.0, worst - error) / worst) ** 2
    return {"total": math.fsum(points.values()), "points": points}


def score_predictions(predictions_file: File, labels_file: File) -> float:
    """Return the accuracy in percent of a predictions file against an annotation file.

    Every labeled image must have exactly one prediction, and there may be no others.
    """
    labels = read_annotations(labels_file)
    if not labels.images:
        raise CovNormError(f"{labels.file}: has no images to score")
    if len(labels.categories_of) < len(labels.images):
        missing = next(i for i in labels.images if i not in labels.categories_of)
        raise CovNormError(
            f"{labels.file}: image {missing} has no annotation. Use a file that is not stripped."
        )
    file, predicted = predictions_file, {}
    for image, category in read_predictions(file):
        if image not in labels.images:
            raise CovNormError(f"{file}: image_id {image} is not in {labels.file}")
        if image in predicted:
            raise CovNormError(f"{file}: image_id {image} is predicted twice. Keep one.")
        if labels.names and category not in labels.names:
            raise CovNormError(
                f"{file}: category_id {category} is not in {labels.file}. Write category ids, not "
                "labels (see categories= of write_predictions)."
            )
        predicted[image] = category
    missed = [i for i in labels.images if i not in predicted]
    if missed:
        raise CovNormError(
            f"{file}: {len(missed)} of the {len(labels.images)} images of {labels.file} have no "
            f"prediction, the first is image_id {missed[0]}"
        )
    correct = sum(predicted[i] == labels.categories_of[i] for i in predicted)
    return 100 * correct / len(predicted)


def score_results(
    predictions: Mapping[str, tuple[File, File]] | File,
    labels: File | None = None,
    *,
    part: str = "test",
    baselines: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return `decathlon_score` computed from files, and the ``"accuracies"``.

    Pass either ``{dataset: (predictions file, labels file)}``, or two folders: predictions
    ``<dataset>.json`` and labels ``<dataset>_<part>.json``. Every predictions file counts.
    """
    if isinstance(predictions, Mapping):
        pairs = dict(predictions)
    elif labels is None:
        raise CovNormError(f"{predictions}: pass the folder of labels as well")
    else:
        files = sorted(Path(predictions).glob("*.json"))
        pairs = {f.stem: (f, Path(labels) / f"{f.stem}_{part}.json") for f in files}
        if not pairs:
            raise CovNormError(f"{predictions}: no predictions <dataset>.json there")
    known = BASELINES if baselines is None else baselines
    for name, (file, _) in pairs.items():  # before any large file is read
        if name not in known:
            raise CovNormError(f"{file}: no baseline for {name!r}: {choices(name, known)}")
    accuracies = {name: score_predictions(*pair) for name, pair in pairs.items()}
    return {**decathlon_score(accuracies, baselines=known), "accuracies": accuracies}


def _percent(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 100:
        raise CovNormError(f"{name} is {value!r}: must be a percentage between 0 and 100")
    return float(value)
