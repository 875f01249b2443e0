"""Every system that the paper compares, behind one door: each a short recipe of the pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..compress.covnorm import absorb_, normalize_
from ..compress.geometric import svd_
from ..compress.gradients import predicted_loss
from ..compress.joint import join_, join_svd_
from .lwf import OldAnswers, distillation, forgetting, fork_
from .run import Run
from .smallest import smallest_file


@dataclass(frozen=True)
class Method:
    """A system: what it is, its recipe, its own settings with their defaults, how it trains."""

    summary: str
    recipe: Callable[..., None]
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    joint: bool = False


# ── one domain ───────────────────────────────────────────────────────────────────────────────


def _train(adapter: str) -> Callable[[Run], None]:
    """The recipe of every system that trains adapters of one kind and leaves it at that."""

    def recipe(run: Run) -> None:
        run.add(adapter)
        run.fit("train", run.training)

    return recipe


def _lwf(run: Run) -> None:
    """Warm-up of the new head alone, then all with the old head's answers as further targets."""
    run.add("own")
    domain = fork_(run.net, run.name)
    strength, T = run.options["strength"], run.options["temperature"]
    if run.options["warm_up"]:
        epochs, lr = run.options["warm_up"], run.options["warm_up_lr"]
        warm_up = replace(run.training, epochs=epochs, lr=lr, head_lr=None)
        assert domain.head is not None
        run.fit("warm-up", warm_up, list(domain.head.parameters()))
    with OldAnswers(run.net, run.name).watched() as old:

        def keep(images: Tensor) -> Tensor:
            return strength * distillation(old.now(), old.before(images), T)

        run.fit("train", run.training, penalty=keep)
    images = run.train if run.val is None else run.val
    run.forgetting = forgetting(run.net, run.name, images, run.options["source"])


def _piggyback(run: Run) -> None:
    run.add("mask")
    for name, mask in run.domain.weights.items():
        mask.unpack_(run.net.backbone.get_submodule(name))
    run.fit("train", run.training)
    run.domain.pack_()


def _fta(run: Run) -> None:
    run.add("lowrank", run.options["rank"])
    run.fit("train", run.training)


def _svd(run: Run) -> None:
    run.add_trained()
    with run.timed("normalize"):
        run.ranks = svd_(run.net, run.name, run.options["rank"])
    run.note("normalize")


def _svd_fta(run: Run) -> None:
    _svd(run)
    run.tune()


def _normalise(run: Run, **fixed: Any) -> bool:
    """Compress the trained A; False: `max_drop` allows nothing smaller than it is."""
    run.add_trained()
    moments = run.collect()
    names = ("variance", "ranks", "budget", "metric", "M", "tune", "preset")
    given = {k: v for k, v in run.options.items() if k in names and v is not None}
    if given.get("metric") == "loss":
        given["gradients"] = run.collect_gradients()
    trained = {site: A.matrix().detach() for site, A in run.domain.maps.items()}
    with run.timed("normalize"):
        if run.options.get("max_drop") is not None:

            def compress(budget: int) -> None:
                normalize_(run.net, run.name, moments, **(given | {"budget": budget}))

            given["budget"], run.dtype = smallest_file(run, run.options["max_drop"], compress)
            if given["budget"] is None:
                shapes = {site: A.factors[0].shape for site, A in run.domain.maps.items()}
                run.ranks = {site: (d_in, d_out) for site, (d_out, d_in) in shapes.items()}
                return False
        run.ranks = normalize_(run.net, run.name, moments, **(given | fixed))
        if "gradients" in given:
            now = {site: A.matrix().detach() for site, A in run.domain.maps.items()}
            run.predicted = predicted_loss(trained, now, moments, given["gradients"])
    return True


def _pca_fta(run: Run) -> None:
    _normalise(run, M="identity", tune="all")
    absorb_(run.net, run.name)
    run.note("normalize")
    run.tune()


def _covnorm(run: Run) -> None:
    run.dtype = run.options["dtype"]
    smaller = _normalise(run)
    run.note("normalize")
    if smaller:
        if run.options["preset"] == "official-code":
            with run.may_decline():
                _tune_as_published(run)
        else:
            run.tune()
        with run.timed("absorb"):
            absorb_(run.net, run.name)
    run.round()


def _tune_as_published(run: Run) -> None:
    """The authors' program: M alone for five epochs, then W and C, norms and head too."""
    parts = [A.get_parameter("M") for A in run.domain.maps.values()]
    tuning, first = run.tuning, min(5, run.tuning.epochs)
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
        run.ranks = {site: kx for site, (kx, _) in found.ranks.items()}
        run.note("normalize")
        run.tune()


def _covnorm_joint(runs: Sequence[Run]) -> None:
    """Domains that share the basis already are tuned again where it grows, or none is new."""
    net, options = runs[0].net, runs[0].options
    new = [r for r in runs if r.name not in net.domains or r.domain.basis != options["basis"]]
    for run in new:
        run.add_trained()
    moments = {run.name: run.collect() for run in new}
    names = ("variance", "ranks", "M", "count", "basis", "metric")
    given = {k: options[k] for k in names if options[k] is not None}
    old = dict(net.bases.items()).get(options["basis"])
    if "loss" in (options["metric"], old and old.settings.get("metric")):
        given["gradients"] = {run.name: run.collect_gradients() for run in new}
    done = None
    if new:
        with runs[0].timed("normalize"):
            done = join_(net, list(moments), moments, grow=options["grow"], **given)
    for run in runs:
        run.joined, run.ranks = done, dict(net.basis(options["basis"]).ranks)
        run.note("normalize")
        if done is None or run.name in done.retune:
            run.tune()


_RANK = {"rank": 0.25}  # 2 r d = half of A, the paper's 5 % against RA's 10 %
_GENTLE = {"lr": 3e-4, "head_lr": 3e-3}  # for weights that were trained already
_BY_VARIANCE = {"variance": None, "ranks": None, "adapter": "residual"}

METHODS: dict[str, Method] = {
    "fnft": Method("fine-tune a copy of everything", _train("own"), training=_GENTLE),
    "bn": Method("BatchNorm affine and statistics alone (Bilen 2017)", _train("batchnorm")),
    "lwf": Method(
        "fine-tune everything, keep the old head's answers (Li 2017)",
        _lwf,
        {"strength": 1.0, "temperature": 2.0, "warm_up": 1, "warm_up_lr": 3e-3, "source": None},
        _GENTLE,
    ),
    "ra": Method("residual adapters in series (Rebuffi 2017)", _train("residual")),
    "parallel": Method("residual adapters beside the layer (Rebuffi 2018)", _train("parallel")),
    "dan": Method("1×1 combinations of the old filters (Rosenfeld)", _train("conv")),
    "svd": Method("A cut to rank r, not tuned", _svd, {**_RANK, "adapter": "residual"}),
    "svd-fta": Method("A cut to rank r, then tuned", _svd_fta, {**_RANK, "adapter": "residual"}),
    "fta": Method("C·W of rank r from scratch", _fta, _RANK),
    "pca-fta": Method("CovNorm's C and W without M, then tuned", _pca_fta, _BY_VARIANCE),
    "piggyback": Method(
        "a binary mask on the frozen weights (Mallya 2018)",
        _piggyback,
        training={"lr": 3e-4, "head_lr": 3e-3, "optimizer": "adam", "weight_decay": 0.0},
    ),
    "covnorm": Method(
        "A ≈ C·M·W by its data's PCAs, M tuned and absorbed",
        _covnorm,
        {
            **_BY_VARIANCE,
            "budget": None,
            "max_drop": None,
            "dtype": None,
            "metric": None,
            "M": None,
            "tune": None,
            "preset": None,
        },
    ),
    "joint-svd": Method(
        "the A's of several domains share W (Rebuffi 2018)",
        _joint_svd,
        {**_RANK, "adapter": "residual", "basis": "joint-svd"},
        joint=True,
    ),
    "covnorm-joint": Method(
        "several domains share C and W, each has its M",
        _covnorm_joint,
        {
            **_BY_VARIANCE,
            "M": None,
            "metric": None,
            "basis": "joint",
            "count": None,
            "grow": 0.95,
        },
        joint=True,
    ),
}
