"""Adapters: what a domain adds to, or changes in, the layers of the backbone. See README.md."""

from .build import build, fresh_config
from .fold import Folded, fold, padded_share, stack
from .infer import run_folded
from .kinds import KINDS, Adapter, ConvAdapter, base_forward
from .maps import CovNormMap, FullMap, LinearMap, LowRankMap
from .merged import merged_weight
from .norms import scale_shifts
from .shared import JointMap, SharedFactors, SharedMap
from .weights import CopiedWeights, MaskWeights, WeightAdapter, shallow_copy, weight_adapters

__all__ = [
    "KINDS",
    "Adapter",
    "ConvAdapter",
    "CopiedWeights",
    "CovNormMap",
    "Folded",
    "FullMap",
    "JointMap",
    "LinearMap",
    "LowRankMap",
    "MaskWeights",
    "SharedFactors",
    "SharedMap",
    "WeightAdapter",
    "base_forward",
    "build",
    "fold",
    "fresh_config",
    "merged_weight",
    "padded_share",
    "run_folded",
    "scale_shifts",
    "shallow_copy",
    "stack",
    "weight_adapters",
]
