"""Every system that the paper compares, each as a short recipe of the steps of a `Run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..compress.covnorm import absorb_, choose_ranks, normalize_to_, ranks_within
from ..compress.geometric import svd_
from ..compress.gradients import predicted_loss
from ..compress.joint import join_, join_svd_
from .lwf import OldHead, distillation, forgetting, fork_
from .run import Run
from .smallest import smallest_file, unmeasured_budget


@dataclass(frozen=True)
class Method:
    """A system: its recipe, its options with their defaults, and its changes to the training.

    norms: which norms of the backbone its domains copy, by default; see `add_domain`.
    """

    summary: str
    recipe: Callable[..., None]
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    joint: bool = False
    norms: str = "shared"


# ── one domain ───────────────────────────────────────────────────────────────────────────────


def _train(adapter: str) -> Callable[[Run], None]:
    """Return the recipe of a system that trains adapters of one kind and does nothing else."""

    def recipe(run: Run) -> None:
        run.add(adapter, run.options.get("rank"))
        run.train_first()

    return recipe


def _lwf(run: Run) -> None:
    """Warm up the new head, then train everything with the old head's outputs as extra targets."""
    run.add("own")
    domain = fork_(run.net, run.name)
    strength, T = run.options["strength"], run.options["temperature"]
    if run.options["warm_up"]:
        epochs, lr = run.options["warm_up"], run.options["warm_up_lr"]
        warm_up = replace(run.choose().training, epochs=epochs, lr=lr, head_lr=None, runs=1)
        assert domain.head is not None
        run.fit("warm-up", warm_up, list(domain.head.parameters()))
    with OldHead(run.net, run.name).watching() as old:

        def keep(images: Tensor) -> Tensor:
            return strength * distillation(old.now(), old.before(images), T)

        run.train_first(keep)
    images = run.train if run.val is None else run.val
    run.result.forgetting = forgetting(run.net, run.name, images, run.options["source"])


def _piggyback(run: Run) -> None:
    run.add("mask")
    for name, mask in run.domain.weights.items():
        mask.unpack_(run.net.backbone.get_submodule(name))
    run.train_first()
    run.domain.pack_()


def _svd(run: Run) -> None:
    run.add_trained()
    with run.timed("normalize"):
        run.result.ranks = svd_(run.net, run.name, run.options["rank"])
    run.note("normalize")


def _svd_fta(run: Run) -> None:
    _svd(run)
    run.tune()


def _pca_fta(run: Run) -> None:
    run.add_trained()
    parts, preset = run.decompose(), replace(run.config.preset, M="identity", tune="all")
    with run.timed("normalize"):
        run.result.ranks = choose_ranks(parts, preset, run.options["ranks"])
        normalize_to_(run.net, run.name, parts, run.result.ranks, preset)
    absorb_(run.net, run.name)
    run.note("normalize")
    run.tune()


def _covnorm(run: Run) -> None:
    run.add_trained()
    run.result.dtype = run.options["dtype"]
    _normalize(run)
    run.note("normalize")
    if not run.result.whole:
        if run.options["preset"] == "official-code":
            with run.may_decline():
                _tune_as_published(run)
        else:
            run.tune()
        with run.timed("absorb"):
            absorb_(run.net, run.name)
    run.round()


def _normalize(run: Run) -> None:
    """Compress the trained A; `max_drop` may allow nothing smaller, which leaves it whole."""
    parts, preset, result = run.decompose(), run.config.preset, run.result
    budget, max_drop = run.options["budget"], run.options["max_drop"]
    with run.timed("normalize"):
        if max_drop is not None and run.released:
            budget = unmeasured_budget(run)
        elif max_drop is not None:

            def compress(budget: int) -> None:
                normalize_to_(run.net, run.name, parts, ranks_within(parts, budget), preset)

            budget, result.dtype = smallest_file(run, max_drop, compress)
            if budget is None:
                result.whole = True
                result.ranks = {site: (len(part.W), len(part.A)) for site, part in parts.items()}
                return
        result.ranks = choose_ranks(parts, preset, run.options["ranks"], budget)
        normalize_to_(run.net, run.name, parts, result.ranks, preset)
        if run.config.in_loss:
            before = {site: part.A for site, part in parts.items()}
            after = {site: A.matrix().detach() for site, A in run.domain.maps.items()}
            assert result.moments is not None
            assert run.gradients is not None
            result.predicted = predicted_loss(before, after, result.moments, run.gradients)


def _tune_as_published(run: Run) -> None:
    """Tune as the authors' program does: only M for five epochs, then W, C, norms and head too."""
    parts = [A.get_parameter("M") for A in run.domain.maps.values()]
    tuning = run.tuning()
    first = min(5, tuning.epochs)
    run.fit("tune-M", replace(tuning, epochs=first, schedule=tuning.factor), parts)

    def later(epoch: float) -> float:
        return tuning.factor(first + epoch)

    run.fit("tune", replace(tuning, epochs=tuning.epochs - first, schedule=later))


# ── several domains ──────────────────────────────────────────────────────────────────────────


def _joint_svd(runs: Sequence[Run]) -> None:
    for run in runs:
        run.add_trained()
    first = runs[0]
    rank, basis = first.options["rank"], first.options["basis"]
    with first.timed("normalize"):
        found = join_svd_(first.net, [r.name for r in runs], rank, basis)
    for run in runs:
        run.result.ranks = {site: kx for site, (kx, _) in found.ranks.items()}
        run.note("normalize")
        run.tune()


def _covnorm_joint(runs: Sequence[Run]) -> None:
    """Domains that already share the basis are tuned again if it grows, or if none is new."""
    net, options = runs[0].net, runs[0].options
    new = [r for r in runs if r.name not in net.domains or r.domain.basis != options["basis"]]
    for run in new:
        run.add_trained()
    moments, done = {run.name: run.collect() for run in new}, None
    names = ("variance", "ranks", "M", "count", "basis", "metric")
    given = {k: options[k] for k in names if options[k] is not None}
    old = dict(net.bases.items()).get(options["basis"])
    if "loss" in (options["metric"], old and old.settings.get("metric")):
        given["gradients"] = {run.name: run.collect_gradients() for run in new}
    if new:
        with runs[0].timed("normalize"):
            done = join_(net, list(moments), moments, grow=options["grow"], **given)
    for run in runs:
        run.result.joined, run.result.ranks = done, dict(net.basis(options["basis"]).ranks)
        run.note("normalize")
        if done is None or run.name in done.retune:
            run.tune()


_RANK = {"rank": 0.25}  # 2 r d = half of A, the paper's 5 % against RA's 10 %
_CUT = {**_RANK, "adapter": "residual"}
_GENTLE = {"lr": 3e-4, "head_lr": 3e-3}  # for weights that are already trained
_BY_VARIANCE: dict[str, Any] = {"variance": None, "ranks": None, "adapter": "residual"}

METHODS: dict[str, Method] = {
    "fnft": Method("fine-tune a copy of everything", _train("own"), training=_GENTLE, norms="own"),
    "bn": Method(
        "only the affine part and statistics of BatchNorm (Bilen 2017)",
        _train("batchnorm"),
        training={"norm_statistics": "batch"},
        norms="own",
    ),
    "lwf": Method(
        "fine-tune everything, keep the old head's outputs (Li 2017)",
        _lwf,
        {"strength": 1.0, "temperature": 2.0, "warm_up": 1, "warm_up_lr": 3e-3, "source": None},
        _GENTLE,
        norms="own",
    ),
    "ra": Method("residual adapters in series (Rebuffi 2017)", _train("residual")),
    "parallel": Method(
        "residual adapters parallel to the layer (Rebuffi 2018)", _train("parallel")
    ),
    "dan": Method("1×1 combinations of the old filters (Rosenfeld)", _train("conv")),
    "svd": Method("A cut to rank r, not tuned", _svd, _CUT),
    "svd-fta": Method("A cut to rank r, then tuned", _svd_fta, _CUT),
    "fta": Method("C·W of rank r from scratch", _train("lowrank"), _RANK),
    "pca-fta": Method("CovNorm's C and W without M, then tuned", _pca_fta, _BY_VARIANCE),
    "piggyback": Method(
        "a binary mask on the frozen weights (Mallya 2018)",
        _piggyback,
        training=_GENTLE | {"optimizer": "adam", "weight_decay": 0.0},
        norms="own",
    ),
    "covnorm": Method(
        "A ≈ C·M·W by the PCAs of its data, M tuned and absorbed",
        _covnorm,
        _BY_VARIANCE
        | dict.fromkeys(("budget", "max_drop", "dtype", "metric", "M", "tune", "preset")),
    ),
    "joint-svd": Method(
        "the A's of several domains share W (Rebuffi 2018)",
        _joint_svd,
        _CUT | {"basis": "joint-svd"},
        joint=True,
    ),
    "covnorm-joint": Method(
        "several domains share C and W; each has its own M",
        _covnorm_joint,
        _BY_VARIANCE | {"M": None, "metric": None, "basis": "joint", "count": None, "grow": 0.95},
        joint=True,
    ),
}
