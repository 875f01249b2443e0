"""The configuration of `add` and `join`: one object with one set of defaults for all callers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compress.precision import PRECISIONS, SMALLEST
from ..errors import CovNormError
from ..methods.config import Config
from ..methods.recipes import METHODS
from ..methods.settings import configure
from ..training.schedules import plain

BATCH = 32  # images per step
MAX_DROP = 0.5  # points of validation accuracy
METRIC = "loss"  # with max_drop: it makes the smaller files (docs/results.md)
VARIANCE = 0.99  # without validation images to measure max_drop on
DTYPE = "float16"  # without max_drop
RANK_RULES = {"variance", "budget", "max_drop", "ranks", "preset", "M"}
TRAINED_BY = {"residual": "ra", "parallel": "parallel", "conv": "dan"}  # adapter kind → method


@dataclass(frozen=True)
class AddConfig:
    """How `add` and `join` make a domain; `add_config` makes and checks one.

    run: the method with its options and training. given: the options as they were given, with
    defaults only where a rank rule was missing. dtype: of the stored numbers, or "smallest".
    measured: max_drop was given, so the validation images must stay held out to measure it.
    """

    run: Config
    given: Mapping[str, Any]
    batch: int
    augment: Callable[[Tensor], Tensor] | None
    dtype: str
    measured: bool = False

    def record(self) -> dict[str, Any]:
        """Return the settings as plain JSON, as the store keeps them."""
        return {
            "method": self.run.method,
            "batch": self.batch,
            "seed": self.run.training.seed,
            "dtype": self.dtype,
            "augment": self.augment and [plain(self.augment), repr(self.augment)],
            **plain(self.given),
        }


def add_config(
    method: str = "covnorm",
    options: Mapping[str, Any] | None = None,
    *,
    batch: int = BATCH,
    augment: Callable[[Tensor], Tensor] | None = None,
    dtype: str | None = None,
    seed: int = 0,
    validation: bool = True,
) -> AddConfig:
    """Check the settings of `add` or `join` and fill in the defaults.

    Args:
        options: of the method (variance=, budget=, …) and of its training (epochs=, lr=, …), as
            `adapt` takes them. If "covnorm" gets no rank rule, it finds the smallest file that
            loses at most half a point of validation accuracy, in the metric of the loss.
        dtype: "float32", "float16", "int8" (matrices with one scale per row), or "smallest" of
            these for "covnorm" with max_drop=. By default "smallest" with max_drop=, otherwise
            "float16".
        validation: whether there are validation images; without them the default rule is
            variance=0.99.
    """
    given = dict(options or {})
    for key in sorted({"seed", "dtype"} & set(given)):
        raise CovNormError(f"{key}= is not an option of a method: give it with --{key}")
    if method == "covnorm" and not RANK_RULES & set(given):
        given |= {"max_drop": MAX_DROP} if validation else {"variance": VARIANCE}
    if "max_drop" in given:
        given.setdefault("metric", METRIC)
        dtype = dtype or SMALLEST
    dtype = dtype or DTYPE
    known = METHODS[method].options if method in METHODS else {}
    if dtype not in (*PRECISIONS, SMALLEST):
        raise CovNormError(f"dtype={dtype!r}: choose {', '.join(PRECISIONS)} or {SMALLEST}")
    if dtype == SMALLEST and "dtype" not in known and method in METHODS:
        raise CovNormError(
            f"dtype={SMALLEST!r} is for method 'covnorm' with max_drop: choose "
            f"{', '.join(PRECISIONS)}"
        )
    rounding = {"dtype": dtype} if "dtype" in known else {}
    run = configure(method, {**given, **rounding, "seed": seed})
    return AddConfig(run, given, batch, augment, dtype, "max_drop" in (options or {}))
