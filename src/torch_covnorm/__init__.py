"""One frozen network, many domains: CovNorm (Li & Vasconcelos, CVPR 2019) for PyTorch."""

from .accounting import Account, account
from .adapt import Adapted, adapt
from .backbones import load_backbone
from .basis import Basis
from .covnorm import PRESETS, absorb_, collect, normalize_
from .data.score import decathlon_score
from .domain import Domain
from .ecology import Ecology
from .errors import CovNormError, CovNormWarning
from .evaluation import Evaluation, evaluate
from .export import Exported, export
from .geometric import svd_
from .gradients import GradientMoments, collect_gradients
from .joint import Joined, join_, join_svd_
from .lwf import forgetting
from .methods import METHODS
from .moments import Moments
from .network import MultiDomainNetwork
from .progress import Progress
from .schedules import TRAININGS, Training
from .sites import Site
from .training import Fit, fit
from .version import __version__

__all__ = [
    "METHODS",
    "PRESETS",
    "TRAININGS",
    "Account",
    "Adapted",
    "Basis",
    "CovNormError",
    "CovNormWarning",
    "Domain",
    "Ecology",
    "Evaluation",
    "Exported",
    "Fit",
    "GradientMoments",
    "Joined",
    "Moments",
    "MultiDomainNetwork",
    "Progress",
    "Site",
    "Training",
    "__version__",
    "absorb_",
    "account",
    "adapt",
    "collect",
    "collect_gradients",
    "decathlon_score",
    "evaluate",
    "export",
    "fit",
    "forgetting",
    "join_",
    "join_svd_",
    "load_backbone",
    "normalize_",
    "svd_",
]
