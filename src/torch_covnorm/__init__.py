"""One frozen network, many domains: CovNorm (Li & Vasconcelos, CVPR 2019) for PyTorch.

The folders follow the method, and each imports only from those before it: stats → adapters →
network → training → compress → methods → backbones, data → ecology → engines → report, serve, cli.

Nothing is imported until a public name is used: the command sets up threads before it loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import *

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


def __getattr__(name: str) -> Any:
    if name not in __all__:  # a folder of the package among them: `from .. import records`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    globals().update({public: getattr(api, public) for public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
