"""The settings of a method: its own and those of its training, checked before anything trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

from ..adapters import KINDS
from ..compress.covnorm import PRESETS, Metric
from ..compress.joint import given_ranks, join_settings
from ..compress.precision import PRECISIONS, SMALLEST
from ..errors import CovNormError, choices
from ..network.domain import check_name
from ..network.network import MultiDomainNetwork
from ..stats.decomposition import MiniAdaptation
from ..stats.ranks import check_budget, check_threshold, rank_of
from ..training.schedules import Training, training_of
from .recipes import METHODS


def settings_of(
    method: str,
    training: Training | str | None,
    tuning: Training | Mapping[str, Any] | None,
    options: dict[str, Any],
) -> tuple[dict[str, Any], Training, Training]:
    """The method's own settings, and how its first and its second stage train; all checked."""
    if method not in METHODS:
        raise CovNormError(f"method={method!r}: {choices(method, METHODS)}")
    chosen = METHODS[method]
    of_training = {f.name for f in fields(Training)}
    for key in options:
        if key not in of_training and key not in chosen.options:
            known = [*chosen.options, *of_training]
            raise CovNormError(f"{key}= is no setting of method {method!r}: {choices(key, known)}")
    own = {**chosen.options, **{k: v for k, v in options.items() if k in chosen.options}}
    _check(own)
    changes = {k: v for k, v in options.items() if k in of_training}
    preset = own.get("preset") if own.get("preset") in PRESETS else None
    first = training_of(training or preset)
    if training is None and preset is None:
        first = first.changed(dict(chosen.training))
    first = first.changed(changes)
    slower = {"paper": 1, "official-code": 10}.get(str(preset), 3)
    head_lr = None if first.head_lr is None else first.head_lr / slower
    second = replace(first, lr=first.lr / slower, head_lr=head_lr)
    if preset is None:
        half = -(-first.epochs // 2)
        milestones = tuple(m * half / max(first.epochs, 1) for m in first.milestones)
        second = replace(second, epochs=half, milestones=milestones)
    if isinstance(tuning, Training):
        second = tuning
    elif tuning is not None:
        second = second.changed(dict(tuning))
    return own, first, second


def _check(own: dict[str, Any]) -> None:
    """Refuse values that no network could take."""
    words = {
        "M": (None, "none", *get_args(MiniAdaptation)),
        "tune": (None, "M", "all"),
        "count": (None, "positions", "images"),
        "adapter": tuple(k for k in KINDS if k != "batchnorm"),
        "preset": (None, *PRESETS),
        "metric": (None, *get_args(Metric)),
        "dtype": (None, *PRECISIONS, SMALLEST),
    }
    for key, value in own.items():
        if key in words and value not in words[key]:
            options = [w for w in words[key] if w is not None]
            raise CovNormError(f"{key}={value!r}: {choices(value, options)}")
    for key in ("variance", "max_drop", "budget", "rank", "grow", "strength", "temperature"):
        number = isinstance(own.get(key, 0), int | float) and not isinstance(own.get(key), bool)
        if not number and own[key] is not None:
            raise CovNormError(f"{key}={own[key]!r}: give a number")
    if not isinstance(own.get("ranks") or {}, Mapping):
        raise CovNormError(f"ranks={own['ranks']!r}: give {{site: (kx, ky)}}")
    rules = [k for k in ("variance", "ranks", "budget", "max_drop") if own.get(k) is not None]
    if len(rules) > 1 and rules != ["variance", "ranks"]:  # ranks for some sites, a rule for others
        raise CovNormError(f"{'=, '.join(rules)}=: each chooses the ranks; give one of them")
    if own.get("variance") is not None:
        check_threshold(own["variance"])
    if own.get("max_drop") is not None and not own["max_drop"] >= 0:
        raise CovNormError(f"max_drop={own['max_drop']}: give points of accuracy, 0 or more")
    closed = own.get("M") in (None, "closed-form") and own.get("preset") != "official-code"
    if own.get("max_drop") is not None and not closed:
        raise CovNormError(
            "max_drop= measures an M in closed form: leave out M= and preset=, or choose the ranks "
            "by variance= or budget="
        )
    if own.get("dtype") == SMALLEST and own.get("max_drop") is None:
        raise CovNormError(
            f"dtype={SMALLEST!r} needs max_drop=, the points of accuracy that it may cost: give "
            f"that, or choose {', '.join(PRECISIONS)}"
        )
    if "rank" in own:
        rank_of(own["rank"], 8, 8)


def check_for(net: MultiDomainNetwork, names: Sequence[str], own: dict[str, Any]) -> None:
    """Refuse now what this network would refuse behind the training."""
    alone = "preset" in own  # joint mode takes ranks, and any M
    if alone and own["metric"] == "loss" and (own["M"] or own["preset"] or own["ranks"]):
        raise CovNormError("metric='loss' chooses ranks and M itself: leave out M, preset, ranks")
    if own.get("budget") is not None:
        maps = [a.A for a in net.fresh_adapters(str(own["adapter"])).values() if a.A is not None]
        least = int(own.get("metric") != "loss")
        check_budget(own["budget"], [sum(A.factors[0].shape) for A in maps], least)
    given_ranks(own.get("ranks") or {}, net.sites)
    basis = own.get("basis")
    if basis is not None and check_name(basis) in net.bases:
        if "rank" in own:
            raise CovNormError(f"basis {basis!r} exists already: give another name as basis=")
        join_settings(net.basis(basis), own["variance"], own["count"], names, own["metric"])
