"""Moments as tensors for the store: the scatter is symmetric, so half of it is enough."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CovNormError
from ..stats.moments import Moments

PARTS = ("n", "images", "mean", "scatter")


def packed(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """{site/n, site/images, site/mean (d,), site/scatter (d(d+1)/2,)}, float64."""
    tensors = {}
    for site, m in moments.items():
        state = m.state_dict()
        rows, columns = torch.triu_indices(m.d, m.d)
        state["scatter"] = state["scatter"].cpu()[rows, columns].contiguous()
        tensors.update({f"{site}/{key}": value.cpu() for key, value in state.items()})
    return tensors


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Moments]:
    """{site: moments} as they were."""
    moments = {}
    for key in tensors:
        site, _, part = key.rpartition("/")
        if part not in PARTS:
            raise CovNormError(f"tensor {key!r} is no part of moments")
        if part != "mean":
            continue
        d, half = len(tensors[key]), tensors[f"{site}/scatter"]
        if half.shape != (d * (d + 1) // 2,):
            raise CovNormError(f"site {site!r}: moments of the wrong shape")
        rows, columns = torch.triu_indices(d, d)
        scatter = half.new_empty(d, d)
        scatter[rows, columns] = scatter[columns, rows] = half
        state = {k: tensors[f"{site}/{k}"] for k in ("n", "images", "mean")}
        moments[site] = Moments(d)
        moments[site].load_state_dict({**state, "scatter": scatter})
    return moments
