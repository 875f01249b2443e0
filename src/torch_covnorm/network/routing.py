"""How a call reaches the domain's own parts: the domain travels with the call.

A routed layer stays where it is in the backbone, of its own class and with its own weights; only
its `forward` first asks the call under way. That call is a context variable, so threads and tasks
do not see each other's, and outside a call the backbone is the plain network it was.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..adapters import base_forward, double, fold, run_folded, scale_shifts
from ..errors import CovNormError
from .prepared import norms_of, site_of
from .sites import Layer, Site

if TYPE_CHECKING:
    from .domain import Domain

_CALL: ContextVar[Call | None] = ContextVar("covnorm_call", default=None)
_STEPWISE: ContextVar[bool] = ContextVar("covnorm_stepwise", default=False)

# What a routed layer is: ("site", Site), or "norm" or "head" with its name.
Role = tuple[str, Any]


def check_plain(layer: nn.Module) -> None:
    """Refuse a layer whose forward is somebody's already."""
    if "forward" in vars(layer):
        raise CovNormError(
            f"{type(layer).__name__} is wrapped already, perhaps by another MultiDomainNetwork: "
            "give each a backbone of its own, loaded anew or copied (copy.deepcopy) before wrapping"
        )


def route_(layer: nn.Module) -> None:
    """Let a layer of the backbone ask the call under way before it runs."""
    layer.forward = types.MethodType(_routed_forward, layer)
    # With a hook on it, no fused kernel (nn.TransformerEncoderLayer's) reads the weight past us.
    layer.register_forward_pre_hook(_no_shortcut)


def _no_shortcut(layer: nn.Module, args: Any) -> None:
    """Changes nothing."""


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a module whose layers ask nobody."""
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if getattr(vars(layer).get("forward"), "__func__", None) is _routed_forward:
            del layer.forward
            hooks = layer._forward_pre_hooks
            for key in [k for k, hook in hooks.items() if hook is _no_shortcut]:
                del hooks[key]
    return copied


def _routed_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = _CALL.get()
    if call is None and torch._C._current_graph_task_id() != -1:
        raise CovNormError(
            "a layer runs again during backward, outside the call that named its domain: switch "
            "gradient checkpointing off"
        )
    role = call.roles.get(layer) if call is not None else None
    if call is None or role is None:
        return type(layer).forward(layer, *args, **kwargs)
    kind, what = role
    if "input" in kwargs:
        args = (kwargs.pop("input"),)
    return getattr(call, kind)(layer, what, *args, **kwargs)


@contextlib.contextmanager
def stepwise() -> Iterator[None]:
    """Inside, adapters run module by module in eval mode too, so that hooks see B1, A and B2."""
    token = _STEPWISE.set(True)
    try:
        yield
    finally:
        _STEPWISE.reset(token)


@contextlib.contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Inside, these modules are in eval mode; behind, each part is in the mode that it was in."""
    before = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for m, mode in before:
            m.training = mode


class Call:
    """One forward pass: its domains, each once, and which of them each sample belongs to.

    `places` lists that for each sample; None: the whole batch is of the one domain.
    """

    def __init__(
        self,
        roles: dict[nn.Module, Role],
        domains: Sequence[Domain],
        places: list[int] | None,
        neutral: dict[str, nn.Module],
    ) -> None:
        self.roles = roles
        self.domains = domains
        self.places = places
        self.neutral = neutral
        self.index: Tensor | None = None
        self.scale_shifts: dict[str, tuple[Tensor, Tensor]] = {}
        known = [d.prepared for d in domains if d.prepared is not None]
        ready = len(known) == len(domains) and not torch.is_grad_enabled()
        self.prepared = known if ready else []
        # What is stacked by domain needs no gathering where each has one sample, in order.
        self.gathers = places is not None and places != list(range(len(domains)))

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, the routed layers ask this call."""
        token = _CALL.set(self)
        try:
            yield
        finally:
            _CALL.reset(token)

    def backbone(self, module: nn.Module) -> nn.Module:
        """The backbone as the call's domain has it: itself, or a double with weights of its own.

        The double shares all but those weights and lives as long as the call, so other threads and
        the backbone see nothing of it. Norms and the head stay routed.
        """
        if self.places is not None or not self.domains[0].weights:
            return module
        return self._double(module, "", {})

    def _double(self, module: nn.Module, name: str, seen: dict[nn.Module, nn.Module]) -> nn.Module:
        if module not in seen:
            weights, role = self.domains[0].weights, self.roles.get(module)
            if role is not None and role[0] in ("norm", "head"):
                seen[module] = module
            else:
                own = weights[name].parameters_for(module) if name in weights else {}
                other = seen[module] = double(module, own)
                prefix = name + "." if name else ""
                other.__dict__["_modules"] = {
                    key: child and self._double(child, prefix + key, seen)
                    for key, child in module._modules.items()
                }
                patched = vars(module).get("forward")
                if role is None and isinstance(patched, types.MethodType):
                    other.forward = types.MethodType(patched.__func__, other)
        return seen[module]

    def site(self, layer: Layer, site: Site, x: Tensor) -> Tensor:
        """A layer with adapters behind it: as the paper writes them, or folded for inference."""
        self._check_input(x, site)
        if self.prepared and not _STEPWISE.get():
            ready = site_of(self.prepared, site, layer.weight)
            return (
                base_forward(layer, x)
                if ready is None
                else run_folded(layer, x, ready, self._index(x))
            )
        adapters = [d.adapters[site.name] for d in self.domains]
        if all(a.idle for a in adapters):
            return base_forward(layer, x)
        if self.places is None:
            adapter = adapters[0]
            if adapter.training or torch.is_grad_enabled() or _STEPWISE.get():
                return adapter(layer, x)
        folded = fold(adapters, site.d_in, site.d_out, layer.weight)
        return run_folded(layer, x, folded, self._index(x))

    def norm(self, layer: _BatchNorm, name: str, x: Tensor) -> Tensor:
        """A BatchNorm of the backbone: the domain's own, or one scale and shift a sample."""
        if self.places is None and (not self.prepared or name in self.domains[0].norms):
            return self.domains[0].norms[name](x)
        if layer.running_mean is None:
            raise CovNormError(
                f"norm {name!r} keeps no running statistics, so samples of a mixed batch would "
                "meet in it: run one domain at a time"
            )
        self._check_samples(x, name)
        if not self.scale_shifts:
            if self.prepared:
                self.scale_shifts = norms_of(self.prepared)
            else:
                self.scale_shifts = scale_shifts([dict(d.norms.items()) for d in self.domains], x)
        scale, shift = self.scale_shifts[name]
        index = self._index(x)
        if index is not None:
            scale, shift = scale[index], shift[index]
        shape = (len(scale), -1) + (1,) * (x.ndim - 2)
        out = torch.addcmul(shift.view(shape), x, scale.view(shape)).to(x.dtype)
        return self.neutral[name](out) if name in self.neutral else out

    def head(self, layer: nn.Module, name: str, x: Tensor) -> Tensor:
        """The head of each domain on its own samples; shorter answers are filled with -inf."""
        if self.places is None:
            return _head(self.domains[0], x)
        self._check_samples(x, name)
        parts = [[n for n, p in enumerate(self.places) if p == i] for i in range(len(self.domains))]
        answers = [_head(d, x[part]) for d, part in zip(self.domains, parts, strict=True)]
        channels = 1 if isinstance(layer, nn.Conv2d) else -1
        width = max(a.shape[channels] for a in answers)
        shape = list(answers[0].shape)
        shape[0], shape[channels] = len(x), width
        out = answers[0].new_full(shape, -torch.inf)
        for part, answer in zip(parts, answers, strict=True):
            out.movedim(channels, 1)[part, : answer.shape[channels]] = answer.movedim(channels, 1)
        return out

    def _check_input(self, x: Tensor, site: Site) -> None:
        channels = x.shape[1] if site.spatial and x.ndim == 4 else x.shape[-1]
        if (site.spatial and x.ndim != 4) or channels != site.d_in:
            wanted = f"(n, {site.d_in}, h, w)" if site.spatial else f"(n, …, {site.d_in})"
            raise CovNormError(f"site {site.name!r}: input is {tuple(x.shape)}, needs {wanted}")
        self._check_samples(x, site.name)

    def _index(self, x: Tensor) -> Tensor | None:
        if not self.gathers:
            return None
        if self.index is None or self.index.device != x.device:
            self.index = torch.tensor(self.places, device=x.device)
        return self.index

    def _check_samples(self, x: Tensor, name: str) -> None:
        if self.places is not None and len(x) != len(self.places):
            raise CovNormError(
                f"{name!r} sees {len(x)} rows for a mixed batch of {len(self.places)} samples, so "
                "their domains cannot be told apart there: run one domain at a time"
            )


def _head(domain: Domain, x: Tensor) -> Tensor:
    return x if domain.head is None else domain.head(x)
