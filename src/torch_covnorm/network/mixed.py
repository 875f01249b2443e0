"""Mixed batches: split them into passes where necessary, and put the outputs together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CovNormError
from .domain import Domain
from .routing import Call


def groups(domains: Sequence[Domain], places: Sequence[int]) -> list[list[int]]:
    """Return the samples of each pass: one per domain that replaces weights, one for all others.

    places (n,): for each sample, the position of its domain in `domains`.
    """
    passes: dict[int, list[int]] = {}
    for sample, place in enumerate(places):
        passes.setdefault(place if domains[place].weights else -1, []).append(sample)
    return list(passes.values())


def run_passes(
    run: Callable[..., Any],
    names: Sequence[str],
    passes: Sequence[Sequence[int]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    as_list: bool,
) -> Any:
    """Call `run` once per pass with its samples, and return the outputs in the order of the batch.

    Tensor arguments with as many rows as the batch are split with it. The outputs are a list
    if they differ in shape, or if `as_list`.
    """
    outputs: list[Any] = [None] * len(names)
    for samples in passes:
        rows = torch.tensor(samples)

        def take(value: Any, rows: Tensor = rows) -> Any:
            batched = isinstance(value, Tensor) and value.ndim and len(value) == len(names)
            return value[rows.to(value.device)] if batched else value

        part = [names[i] for i in samples]
        one = part[0] if len(set(part)) == 1 else part
        out = run(*map(take, args), domain=one, **{k: take(v) for k, v in kwargs.items()})
        _check_splittable(out, Tensor | list, len(samples))
        for i, output in zip(samples, out, strict=True):
            outputs[i] = output
    alike = all(isinstance(o, Tensor) for o in outputs) and len({o.shape for o in outputs}) == 1
    return torch.stack(outputs) if alike and not as_list else outputs


def finish(out: Any, call: Call) -> Any:
    """Run the own modules on the backbone's output, and separate outputs of unequal length."""
    if call.places is None:
        return _run_own(call.domains[0], out)
    widths = [d.width for d in call.domains]
    if None in widths and len(set(widths)) > 1:
        raise CovNormError(
            "domains with and without a head cannot share a batch: run them separately"
        )
    if not any(d.runs_own for d in call.domains) and len(set(widths)) == 1:
        return out
    _check_splittable(out, Tensor, len(call.places))
    conv_head = isinstance(call.domains[0].head, nn.Conv2d)
    outputs = []
    for row, i in zip(out, call.places, strict=True):
        width = widths[i]
        if width is not None and len(set(widths)) > 1:
            row = row[:width] if conv_head else row[..., :width]
        output = _run_own(call.domains[i], row[None])
        outputs.append(output[0] if isinstance(output, Tensor) else output)
    return outputs


def _run_own(domain: Domain, out: Any) -> Any:
    return domain.own(out) if domain.runs_own and domain.own is not None else out


def _check_splittable(out: Any, types: Any, samples: int) -> None:
    if not isinstance(out, types) or len(out) != samples:
        raise CovNormError(
            f"the backbone returned a {type(out).__name__}, which cannot be split by sample. Run "
            "one domain at a time."
        )
