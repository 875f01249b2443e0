"""Check the settings of a method, once, before anything trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

from ..adapters import KINDS
from ..compress.covnorm import PRESETS, Tuned
from ..compress.gradients import Metric
from ..compress.joint import Count, check_new_basis, join_settings
from ..compress.precision import PRECISIONS, SMALLEST
from ..errors import CovNormError, check_choice, choices
from ..network.domain import check_name
from ..network.network import MultiDomainNetwork
from ..network.sites import NORMS
from ..stats.decomposition import MiniAdaptation
from ..stats.ranks import check_budget, check_rank_pairs, check_threshold, rank_of
from ..training.schedules import AUTO, CHOICES, Training, renamed_norms, training_of
from .config import Config
from .recipes import METHODS

WORDS = {
    "M": ("none", *get_args(MiniAdaptation)),  # "none" only in joint mode
    "tune": get_args(Tuned),
    "count": get_args(Count),
    "adapter": tuple(k for k in KINDS if k != "batchnorm"),
    "preset": tuple(PRESETS),
    "metric": get_args(Metric),
    "dtype": (*PRECISIONS, SMALLEST),
}
NUMBERS = ("variance", "max_drop", "budget", "grow", "strength", "temperature")
RANK_RULES = ("variance", "ranks", "budget", "max_drop")
TUNED_SLOWER = {"paper": 1, "official-code": 10}  # by preset; otherwise 3


def configure(
    method: str = "covnorm",
    options: Mapping[str, Any] | None = None,
    *,
    training: Training | str | None = None,
    tuning: Training | Mapping[str, Any] | None = None,
) -> Config:
    """Check a method, its options and its training, and return them as a `Config`.

    Args:
        options: of the method (variance=, rank=, …), norms= of a new domain ("shared", "sites" or
            "own"; see `add_domain`), and single settings of training (epochs=, …).
        training: of the first stage: a `Training`, or the name of one; ``Training("auto")`` by
            default.
        tuning: of the stage after compression: a `Training`, or changes to the default one, which
            is `training` with a third of its rate and half of its epochs (as `training` for
            preset="paper", with a tenth of the rate for "official-code").
    """
    check_choice("method", method, METHODS)
    chosen, options = METHODS[method], dict(options or {})
    norms = options.pop("norms", None)
    if norms in CHOICES["norm_statistics"]:
        options["norm_statistics"], norms = renamed_norms(norms), "own"
    of_training = {f.name for f in fields(Training)}
    for key in options:
        if key not in of_training and key not in chosen.options:
            known = [*chosen.options, "norms", *of_training]
            raise CovNormError(f"method {method!r} has no setting {key}=: {choices(key, known)}")
    given = {**chosen.options, **{k: v for k, v in options.items() if k in chosen.options}}
    _check_options(given)
    preset = given.get("preset")
    if norms is None:
        norms = chosen.norms if preset is None else "own"  # as published
    check_choice("norms", norms, NORMS)
    first = training_of(training or preset or AUTO)
    if training is None and preset is None:
        first = first.changed(dict(chosen.training))
    first = first.changed({k: v for k, v in options.items() if k in of_training})
    if not isinstance(tuning, Training):
        tuning = _tuning(first, preset).changed(dict(tuning or {}))
    if tuning.runs not in (1, AUTO):
        raise CovNormError(f"tuning has runs={tuning.runs}: only the first stage can have several")
    return Config(method, given, first, replace(tuning, runs=1), norms)


def _tuning(first: Training, preset: str | None) -> Training:
    slower = TUNED_SLOWER.get(str(preset), 3)
    head_lr = None if first.head_lr is None else first.head_lr / slower
    lr = first.lr if first.lr == AUTO else first.lr / slower
    second = replace(first, lr=lr, head_lr=head_lr, runs=1)
    if preset is not None or first.epochs == AUTO:
        return second
    half = -(-first.epochs // 2)
    milestones = tuple(m * half / max(first.epochs, 1) for m in first.milestones)
    return replace(second, epochs=half, milestones=milestones)


def _check_options(given: Mapping[str, Any]) -> None:
    """Refuse values that no network could take."""
    words = WORDS if "basis" in given else WORDS | {"M": get_args(MiniAdaptation)}
    for key, value in given.items():
        if key in words and (value is not None or key == "adapter"):
            check_choice(key, value, words[key])
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in NUMBERS and value is not None and not number:
            raise CovNormError(f"{key}={value!r}: give a number")
    if not isinstance(given.get("ranks") or {}, Mapping):
        raise CovNormError(f"ranks={given['ranks']!r}: give {{site: (kx, ky)}}")
    rules = [k for k in RANK_RULES if given.get(k) is not None]
    if len(rules) > 1 and rules != ["variance", "ranks"]:  # ranks for some sites, a rule for others
        raise CovNormError(f"{'=, '.join(rules)}=: each chooses the ranks; give one of them")
    if given.get("variance") is not None:
        check_threshold(given["variance"])
    max_drop = given.get("max_drop")
    if max_drop is not None and not max_drop >= 0:
        raise CovNormError(f"max_drop={max_drop}: give points of accuracy, 0 or more")
    closed = given.get("M") in (None, "closed-form") and given.get("preset") != "official-code"
    if max_drop is not None and not closed:
        raise CovNormError(
            "max_drop= needs an M in closed form: leave out M= and preset=, or choose the ranks "
            "by variance= or budget="
        )
    if given.get("dtype") == SMALLEST and max_drop is None:
        raise CovNormError(
            f"dtype={SMALLEST!r} needs max_drop=, the points of accuracy it may cost: give that, "
            f"or choose {', '.join(PRECISIONS)}"
        )
    if "rank" in given:
        rank_of(given["rank"], 8, 8)


def check_for(net: MultiDomainNetwork, names: Sequence[str], config: Config) -> None:
    """Refuse, before training, what this network would refuse after it."""
    options = config.options
    chosen = "preset" in options and any(options[k] for k in ("M", "preset", "ranks"))
    if config.in_loss and chosen:  # joint mode, which has no presets, takes ranks and any M
        raise CovNormError("metric='loss' chooses ranks and M itself: leave out M, preset, ranks")
    if options.get("budget") is not None:
        adapters = net.fresh_adapters(str(options["adapter"])).values()
        costs = [sum(a.A.factors[0].shape) for a in adapters if a.A is not None]
        check_budget(options["budget"], costs, least=0 if config.in_loss else 1)
    check_rank_pairs(options.get("ranks") or {}, net.sites)
    basis = options.get("basis")
    if basis is not None and check_name(basis) in net.bases:
        if "rank" in options:
            check_new_basis(net, basis)
        variance, count, metric = (options[k] for k in ("variance", "count", "metric"))
        join_settings(net.basis(basis), variance, count, names, metric)
