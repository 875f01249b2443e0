"""The two ends of a mixed batch: which domains must run apart, and the answers put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CovNormError
from .domain import Domain
from .routing import Call


def groups(domains: Sequence[Domain], places: Sequence[int]) -> list[list[int]]:
    """The samples of each pass: a domain with weights of its own runs apart, all others at once.

    places (n,) names each sample's domain.
    """
    passes: dict[int, list[int]] = {}
    for sample, place in enumerate(places):
        passes.setdefault(place if domains[place].weights else -1, []).append(sample)
    return list(passes.values())


def run_apart(
    run: Callable[..., Any],
    names: Sequence[str],
    passes: Sequence[Sequence[int]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    owned: bool,
) -> Any:
    """One call a pass, each with its own samples; the answers in the batch's order.

    Arguments that are tensors of as many rows as the batch are split with it. Where `own` modules
    ran, the answers are a list, as when nothing runs apart.
    """
    answers: list[Any] = [None] * len(names)
    for samples in passes:
        rows = torch.tensor(samples)

        def take(value: Any, rows: Tensor = rows) -> Any:
            batched = isinstance(value, Tensor) and value.ndim and len(value) == len(names)
            return value[rows.to(value.device)] if batched else value

        part = [names[i] for i in samples]
        one = part[0] if len(set(part)) == 1 else part
        out = run(*map(take, args), domain=one, **{k: take(v) for k, v in kwargs.items()})
        if not isinstance(out, Tensor | list) or len(out) != len(samples):
            raise CovNormError(_unsplittable(out))
        for i, answer in zip(samples, out, strict=True):
            answers[i] = answer
    alike = all(isinstance(a, Tensor) for a in answers) and len({a.shape for a in answers}) == 1
    return torch.stack(answers) if alike and not owned else answers


def finish(out: Any, call: Call) -> Any:
    """Each domain's own module on its part, and answers of unequal length apart."""
    if call.places is None:
        return _own(call.domains[0], out)
    widths = [d.width for d in call.domains]
    if None in widths and len(set(widths)) > 1:
        raise CovNormError("domains with and without a head in one batch: run them apart")
    owned = any(d.runs_own for d in call.domains)
    if not owned and len(set(widths)) == 1:
        return out
    if not isinstance(out, Tensor) or len(out) != len(call.places):
        raise CovNormError(_unsplittable(out))
    conv_head = isinstance(call.domains[0].head, nn.Conv2d)
    answers = []
    for row, i in zip(out, call.places, strict=True):
        width = widths[i]
        if width is not None and len(set(widths)) > 1:
            row = row[:width] if conv_head else row[..., :width]
        answer = _own(call.domains[i], row[None])
        answers.append(answer[0] if isinstance(answer, Tensor) else answer)
    return answers


def _own(domain: Domain, out: Any) -> Any:
    return domain.own(out) if domain.runs_own and domain.own is not None else out


def _unsplittable(out: Any) -> str:
    return (
        f"the backbone returns {type(out).__name__}, which cannot be split by sample: run one "
        "domain at a time"
    )
