"""Where images come from: small real samples, the Visual Decathlon's archive and its score.

Importing this loads no image library; reading the first image does.
"""

from __future__ import annotations

from .decathlon import PUBLISHED, RULES, Decathlon, Split
from .images import (
    Augment,
    Rule,
    centre_crop,
    channel_statistics,
    normalise,
    random_crop,
    random_flip,
    read_image,
    resize,
)
from .sample import SAMPLES, Sample, load_sample, prepare
from .score import (
    BASELINES,
    Annotations,
    decathlon_score,
    read_annotations,
    score_predictions,
    score_results,
    write_predictions,
)

__all__ = [
    "BASELINES",
    "PUBLISHED",
    "RULES",
    "SAMPLES",
    "Annotations",
    "Augment",
    "Decathlon",
    "Rule",
    "Sample",
    "Split",
    "centre_crop",
    "channel_statistics",
    "decathlon_score",
    "load_sample",
    "normalise",
    "prepare",
    "random_crop",
    "random_flip",
    "read_annotations",
    "read_image",
    "resize",
    "score_predictions",
    "score_results",
    "write_predictions",
]
