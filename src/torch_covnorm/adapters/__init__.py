"""Adapters: what a domain adds to, or changes in, the layers of the backbone. See README.md."""

from .build import build, fresh_adapter
from .fold import Folded, fold, padded_share, stack
from .infer import merged_weight, run_folded
from .kinds import KINDS, Adapter, ConvAdapter
from .maps import CovNormMap, FullMap, LinearMap, LowRankMap
from .norms import NormTable
from .shared import JointMap, SharedFactors, SharedMap
from .site import Layer, Site, base_forward
from .weights import CopiedWeights, MaskWeights, WeightAdapter, shallow_copy, weight_adapters
