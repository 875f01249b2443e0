"""Where images come from: a user's own, small real samples, the Visual Decathlon and its score.

Importing this loads no image library; reading the first image does.
"""

from __future__ import annotations

from .decathlon import PUBLISHED, RULES, Decathlon, Split
from .decode import decode, fit_image, load_image
from .images import (
    Augment,
    Rule,
    centre_crop,
    channel_statistics,
    normalise,
    random_crop,
    random_flip,
    resize,
)
from .reading import read_image
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
from .source import Source, read_source
from .splits import Decoded, Images, Items

__all__ = [
    "BASELINES",
    "PUBLISHED",
    "RULES",
    "SAMPLES",
    "Annotations",
    "Augment",
    "Decathlon",
    "Decoded",
    "Images",
    "Items",
    "Rule",
    "Sample",
    "Source",
    "Split",
    "centre_crop",
    "channel_statistics",
    "decathlon_score",
    "decode",
    "fit_image",
    "load_image",
    "load_sample",
    "normalise",
    "prepare",
    "random_crop",
    "random_flip",
    "read_annotations",
    "read_image",
    "read_source",
    "resize",
    "score_predictions",
    "score_results",
    "write_predictions",
]
