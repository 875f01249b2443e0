"""One frozen network, many domains: CovNorm (Li & Vasconcelos, CVPR 2019) for PyTorch."""

from .backbones import load_backbone
from .covnorm import PRESETS, absorb_, collect, normalize_
from .domain import Domain
from .errors import CovNormError, CovNormWarning
from .moments import Moments
from .network import MultiDomainNetwork
from .sites import Site
from .version import __version__

__all__ = [
    "PRESETS",
    "CovNormError",
    "CovNormWarning",
    "Domain",
    "Moments",
    "MultiDomainNetwork",
    "Site",
    "__version__",
    "absorb_",
    "collect",
    "load_backbone",
    "normalize_",
]
