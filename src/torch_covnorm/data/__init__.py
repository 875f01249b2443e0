"""Images: from users' files, small real samples, and the Visual Decathlon with its score.

Importing this loads no image library. Reading the first image does.
"""

from __future__ import annotations

from ..training.augment import Augment
from .annotations import Annotations, read_annotations, write_predictions
from .decathlon import PUBLISHED, RULES, Decathlon, Split
from .decode import Decoded, Images, decode
from .image_files import load_image, read_image
from .images import (
    Rule,
    centre_crop,
    channel_statistics,
    fit_image,
    normalise,
    prepare,
    random_crop,
    random_flip,
    resize,
)
from .sample import SAMPLES, Sample, load_sample
from .score import BASELINES, decathlon_score, score_predictions, score_results
from .source import Source, read_source
from .splits import Items

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
