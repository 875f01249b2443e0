"""Where images come from: the Visual Decathlon's archive, its score, and augmentation.

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
    "Annotations",
    "Augment",
    "Decathlon",
    "Rule",
    "Split",
    "centre_crop",
    "channel_statistics",
    "decathlon_score",
    "normalise",
    "random_crop",
    "random_flip",
    "read_annotations",
    "read_image",
    "resize",
    "score_predictions",
    "score_results",
    "write_predictions",
]
