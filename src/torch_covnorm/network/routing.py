"""How a call of the network reaches the parts of its domain.

A routed layer keeps its place in the backbone, its class and its weights. Only its `forward` first
looks up the current call, which is a context variable: threads and tasks do not see each other's
calls. Outside a call, the backbone is the plain network that it was.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..adapters import Layer, NormTable, Site, base_forward, fold, run_folded, shallow_copy
from ..errors import CovNormError
from .domain import Domain
from .prepared import prepared_site
from .unpicklable import Unpicklable

_CALL: ContextVar[Call | None] = ContextVar("covnorm_call", default=None)
_STEPWISE: ContextVar[bool] = ContextVar("covnorm_stepwise", default=False)


class _Traced:
    """The call that torch.compile is tracing, which cannot read a context variable.

    It is set only inside the traced function, so at run time it is always None.
    """

    call: Call | None = None


TRACED = _Traced()


@dataclass(frozen=True)
class RoutedNorm:
    """A BatchNorm of the backbone: a domain shares it or has a copy of it."""

    name: str


@dataclass(frozen=True)
class RoutedHead:
    """The layer that each domain replaces with its head."""

    name: str


Role = Site | RoutedNorm | RoutedHead  # what a routed layer of the backbone is


def route_(layers: Collection[nn.Module]) -> None:
    """Make layers of the backbone look up the current call before they run."""
    for layer in layers:
        if "forward" in vars(layer):
            raise CovNormError(
                f"{type(layer).__name__} is already wrapped, perhaps by another MultiDomainNetwork."
                " Give each network its own backbone: reload it, or copy.deepcopy it before "
                "wrapping."
            )
    for layer in layers:
        layer.forward = types.MethodType(_routed_forward, layer)
        # A hook disables fused kernels (nn.TransformerEncoderLayer's), which read the weight.
        layer.register_forward_pre_hook(_no_shortcut)


class _NoShortcut(Unpicklable):
    """A hook that does nothing. Pickled, its layer would lose the `forward` above."""

    def __call__(self, layer: nn.Module, args: Any) -> None:
        """Do nothing."""


_no_shortcut = _NoShortcut()


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without routing."""
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if getattr(vars(layer).get("forward"), "__func__", None) is _routed_forward:
            del layer.forward
            hooks = layer._forward_pre_hooks
            for key in [k for k, hook in hooks.items() if hook is _no_shortcut]:
                del hooks[key]
    return copied


def _routed_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = TRACED.call if torch.compiler.is_dynamo_compiling() else None
    if call is None:
        call = _CALL.get()
    if call is None and torch._C._current_graph_task_id() != -1:
        raise CovNormError(
            "a layer runs again during backward, when the domain of its call is no longer known. "
            "Switch gradient checkpointing off."
        )
    role = None if call is None else call.roles.get(layer)
    if call is None or role is None:
        return type(layer).forward(layer, *args, **kwargs)
    return call.run(layer, role, *args, **kwargs)


@contextlib.contextmanager
def _setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def stepwise() -> contextlib.AbstractContextManager[None]:
    """Run adapters module by module in eval mode too, inside, so that hooks see B1, A and B2."""
    return _setting(_STEPWISE, True)


def runs_stepwise() -> bool:
    """Return whether the current context is inside `stepwise`."""
    return _STEPWISE.get()


@contextlib.contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Set these modules to eval mode inside, and every part of them to its previous mode after."""
    before = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for m, mode in before:
            m.training = mode


@dataclass
class Call:
    """One forward pass.

    domains: the domains of the batch, each once. places: for each sample, the position of its
    domain in `domains`; None if the whole batch belongs to one domain. neutral: for norms of
    subclasses, what they do apart from normalizing.
    """

    roles: Mapping[nn.Module, Role]
    domains: Sequence[Domain]
    places: list[int] | None
    neutral: Mapping[str, nn.Module]
    index: Tensor | None = None  # `places` on the device
    scale_shifts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [d.prepared for d in self.domains if d.prepared is not None]
        ready = len(known) == len(self.domains) and not torch.is_grad_enabled()
        self.prepared = known if ready else []
        # No gathering is needed if every domain has exactly one sample, in order.
        self.gathers = self.places not in (None, list(range(len(self.domains))))

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Let the routed layers use this call inside."""
        return _setting(_CALL, self)

    def backbone(self, module: nn.Module) -> nn.Module:
        """Return the backbone for this call: itself, or a shallow copy with the domain's weights.

        The copy shares everything else and lives as long as the call, so neither the backbone nor
        other threads see it. Norms and the head stay routed.
        """
        if self.places is not None or not self.domains[0].weights:
            return module
        return self._with_weights(module, "", {})

    def _with_weights(
        self, module: nn.Module, name: str, copies: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        if module in copies:
            return copies[module]
        role, weights = self.roles.get(module), self.domains[0].weights
        if isinstance(role, RoutedNorm | RoutedHead):
            return module
        prefix = name + "." if name else ""
        children = {
            key: child and self._with_weights(child, prefix + key, copies)
            for key, child in module._modules.items()
        }
        parameters = weights[name].parameters_for(module) if name in weights else {}
        other = copies[module] = shallow_copy(module, parameters, children)
        patched = vars(module).get("forward")
        if role is None and isinstance(patched, types.MethodType):
            other.forward = types.MethodType(patched.__func__, other)
        return other

    def run(self, layer: nn.Module, role: Role, input: Tensor) -> Tensor:
        """Run a routed layer with the parts of the call's domains."""
        if isinstance(role, Site):
            return self._site(cast(Layer, layer), role, input)
        if isinstance(role, RoutedNorm):
            return self._norm(cast(_BatchNorm, layer), role.name, input)
        return self._head(layer, role.name, input)

    def _site(self, layer: Layer, site: Site, x: Tensor) -> Tensor:
        """Run the adapters module by module, or folded for inference."""
        self._check_input(x, site)
        # A compiler fuses the modules itself.
        folded, stepwise = None, torch.compiler.is_dynamo_compiling() or runs_stepwise()
        if self.prepared and not stepwise:
            folded = prepared_site(self.prepared, site, layer.weight)
        else:
            first, *rest = adapters = [d.adapters[site.name] for d in self.domains]
            if not rest and (first.training or torch.is_grad_enabled() or stepwise):
                return first(layer, x)
            if not all(a.idle for a in adapters):
                folded = fold(adapters, site, layer.weight)
        if folded is None:
            return base_forward(layer, x)
        return run_folded(layer, x, folded, self._index(x))

    def _norm(self, layer: _BatchNorm, name: str, x: Tensor) -> Tensor:
        """Run the shared norm, the domain's copy of it, or one scale and shift per sample."""
        shared = not any(d.has_norm(name) for d in self.domains)
        if self.places is None and name in self.domains[0].norms:
            return self.domains[0].norms[name](x)
        if shared and (self.places is None or layer.running_mean is not None):
            return type(layer).forward(layer, x)
        if layer.running_mean is None:
            raise CovNormError(
                f"norm {name!r} has no running statistics, so it would mix the samples of a mixed "
                "batch. Run one domain at a time."
            )
        self._check_samples(x, name)
        if not self.scale_shifts:
            self.scale_shifts = self._norm_table(x).by_name()
        scale, shift = self.scale_shifts[name]
        index = self._index(x)
        if index is not None:
            scale, shift = scale[index], shift[index]
        shape = (len(scale), -1) + (1,) * (x.ndim - 2)
        out = torch.addcmul(shift.view(shape), x, scale.view(shape)).to(x.dtype)
        return self.neutral[name](out) if name in self.neutral else out

    def _norm_table(self, x: Tensor) -> NormTable:
        """Return scales and shifts of the norms that any domain has a copy of.

        For a domain that shares such a norm, they are the backbone's.
        """
        layers = {
            role.name: cast(_BatchNorm, layer)
            for layer, role in self.roles.items()
            if isinstance(role, RoutedNorm) and any(d.has_norm(role.name) for d in self.domains)
        }
        if self.prepared:
            return NormTable.joined([p.norms.completed(layers, x) for p in self.prepared])
        return NormTable.of([{**layers, **dict(d.norms.items())} for d in self.domains], x)

    def _head(self, layer: nn.Module, name: str, x: Tensor) -> Tensor:
        """Run each domain's head on its samples, and pad shorter outputs with -inf."""
        heads = [nn.Identity() if d.head is None else d.head for d in self.domains]
        if self.places is None:
            return heads[0](x)
        self._check_samples(x, name)
        parts = [[n for n, p in enumerate(self.places) if p == i] for i in range(len(heads))]
        outputs = [head(x[part]) for head, part in zip(heads, parts, strict=True)]
        channels = 1 if isinstance(layer, nn.Conv2d) else -1
        shape = list(outputs[0].shape)
        shape[0], shape[channels] = len(x), max(o.shape[channels] for o in outputs)
        padded = outputs[0].new_full(shape, -torch.inf)
        for part, out in zip(parts, outputs, strict=True):
            padded.movedim(channels, 1)[part, : out.shape[channels]] = out.movedim(channels, 1)
        return padded

    def _check_input(self, x: Tensor, site: Site) -> None:
        channels = x.shape[1] if site.spatial and x.ndim == 4 else x.shape[-1]
        if (site.spatial and x.ndim != 4) or channels != site.d_in:
            wanted = f"(n, {site.d_in}, h, w)" if site.spatial else f"(n, …, {site.d_in})"
            raise CovNormError(
                f"site {site.name!r}: the input is {tuple(x.shape)} but must be {wanted}"
            )
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
                f"layer {name!r} receives {len(x)} rows for a mixed batch of {len(self.places)} "
                "samples, so their domains cannot be told apart there. Run one domain at a time."
            )
