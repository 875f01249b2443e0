"""The result of a run: filled while the recipe runs, returned by `adapt`, kept by the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compress.joint import Joined
from ..network.domain import Domain
from ..stats.decomposition import Decomposition
from ..stats.moments import Moments


@dataclass
class Adapted:
    """What `adapt` did.

    accuracy: on the validation data, in percent; None without them. `stages` has the same after
        each stage, and `tested` the accuracy on the test data, if they were given.
    parameters: as `MultiDomainNetwork.num_parameters` counts them; `account` has more detail.
    seconds: by stage. ranks: {site: (kx, ky)}, or {site: r} for the SVD.
    forgetting: for lwf. joined: for covnorm-joint, with the variance that the basis captures.
    moments: of A's input by site, if the method collects them.
    parts: {site: `Decomposition`} of the trained A's, if the method decomposes them.
    predicted: for metric="loss", the predicted loss of the compression and its standard error.
    declined: tuning validated worse than what it started from, which was kept.
    choices: what ``Training("auto")`` chose: epochs, rate, augmentation, class weights.
    linear: adapting did not help, so the domain is a linear head on the frozen backbone.
    trained: the domain before compression, if it was asked for.
    whole: max_drop allowed nothing smaller than the full A's, so they were kept.
    dtype: for covnorm, the precision that its numbers are rounded to; None leaves them as trained.
        `storage` is {precision: {"bytes", "accuracy"}}: what each precision would cost, validated.
    """

    domain: str
    method: str
    accuracy: float | None = None
    parameters: dict[str, int] = field(default_factory=dict)
    stages: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    forgetting: dict[str, float] | None = None
    joined: Joined | None = None
    tested: dict[str, float | None] = field(default_factory=dict)
    moments: dict[str, Moments] | None = None
    parts: dict[str, Decomposition] | None = None
    predicted: dict[str, float | None] | None = None
    declined: bool = False
    choices: dict[str, Any] = field(default_factory=dict)
    linear: bool = False
    trained: Domain | None = None
    whole: bool = False
    dtype: str | None = None
    storage: dict[str, dict[str, Any]] | None = None

    def record(self) -> dict[str, Any]:
        """Return what the store keeps of a run, as plain JSON."""
        return {
            "validation": self.accuracy,
            "declined": self.declined,
            "choices": self.choices,
            "linear": self.linear,
            "forgetting": self.forgetting,
            "predicted": self.predicted,
            "whole": self.whole,
            "ranks": {
                site: [rank, rank] if isinstance(rank, int) else list(rank)
                for site, rank in self.ranks.items()
            },
            "seconds": dict(self.seconds),
            "dtype": self.dtype,
            "storage": self.storage,
        }
