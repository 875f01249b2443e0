"""Moments as tensors for the store. The scatter is symmetric, so only one half is stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CovNormError
from ..stats.moments import Moments

PARTS = ("n", "images", "mean", "scatter")


def packed(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Return {site/n, site/images, site/mean (d,), site/scatter (d(d+1)/2,)}, in float64."""
    tensors = {}
    for site, m in moments.items():
        state = {part: value.cpu() for part, value in m.state_dict().items()}
        state["scatter"] = state["scatter"][*torch.triu_indices(m.d, m.d)].contiguous()
        tensors.update({f"{site}/{part}": value for part, value in state.items()})
    return tensors


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Moments]:
    """Return {site: moments} from what `packed` returned."""
    moments = {}
    sites = dict.fromkeys(key.rpartition("/")[0] for key in tensors)
    if set(tensors) != {f"{site}/{part}" for site in sites for part in PARTS}:
        raise CovNormError("is not a file of moments: restore it from a copy")
    for site in sites:
        state = {part: tensors[f"{site}/{part}"] for part in PARTS}
        d, half = len(state["mean"]), state["scatter"]
        if half.shape != (d * (d + 1) // 2,):
            raise CovNormError(f"site {site!r}: the scatter has the wrong shape")
        rows, columns = torch.triu_indices(d, d)
        state["scatter"] = half.new_empty(d, d)
        state["scatter"][rows, columns] = state["scatter"][columns, rows] = half
        moments[site] = Moments(d)
        moments[site].load_state_dict(state)
    return moments
