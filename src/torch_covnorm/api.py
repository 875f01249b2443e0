"""The public names, imported from where they are. `torch_covnorm` loads this when one is used."""

from __future__ import annotations

from .adapters import Site
from .backbones import load_backbone
from .compress.collect import collect
from .compress.covnorm import PRESETS, absorb_, normalize_
from .compress.geometric import svd_
from .compress.gradients import GradientMoments, collect_gradients
from .compress.joint import Joined, join_, join_svd_
from .data.score import decathlon_score
from .ecology import Ecology
from .engines.export import Exported, export
from .errors import CovNormError, CovNormWarning
from .methods.adapt import adapt
from .methods.lwf import forgetting
from .methods.recipes import METHODS
from .methods.result import Adapted
from .network.accounting import Account, account
from .network.basis import Basis
from .network.domain import Domain
from .network.network import MultiDomainNetwork
from .stats.moments import Moments
from .training.evaluation import Evaluation, evaluate
from .training.fit import Fit, fit
from .training.progress import Progress
from .training.schedules import TRAININGS, Training
from .version import __version__
