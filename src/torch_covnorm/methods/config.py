"""The configuration of one run of a method: checked once, then passed down unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..compress.covnorm import Preset, preset_of
from ..training.schedules import TRAININGS, Training, plain


@dataclass(frozen=True)
class Config:
    """A method, its options, and the training of its two stages; `configure` makes and checks one.

    options: every option of the method with its value, its default where none was given.
    training: of the first stage. tuning: of the stage after compression.
    norms: which norms of the backbone a new domain copies; see `add_domain`.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Training = TRAININGS["default"]
    tuning: Training = TRAININGS["default"]
    norms: str = "shared"

    @property
    def preset(self) -> Preset:
        """The preset of CovNorm with this configuration's variance, M and tune."""
        given = {k: self.options.get(k) for k in ("variance", "M", "tune")}
        return preset_of(self.options.get("preset") or "paper", **given)

    @property
    def in_loss(self) -> bool:
        """Whether directions are compared in the metric of the loss."""
        return self.options.get("metric") == "loss"

    def record(self) -> dict[str, Any]:
        """Return what identifies a run as plain JSON; a function by its name."""
        options = {**plain(self.options), "norms": self.norms}
        return {"method": self.method, **options, **self.training.record()}
