"""`torch.compile` for a network: one graph of the backbone, which all domains of a form share.

A domain reaches its layers through a context variable, which torch.compile cannot trace. So what is
compiled is a function of the backbone *and the call*: the tensors of the domain are inputs of the
graph, and another domain with the same kinds of parts runs it as it is. Their sizes (classes,
ranks) are symbols from the second size on.

Import this module only where compiling is asked for: it imports torch's compiler, which is slow.
"""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from ..errors import CovNormError, CovNormWarning
from .prepared import DroppedModules
from .routing import TRACED, Call, runs_stepwise

# torch's compiler: sizes of parameters may become symbols, and a network may have this many graphs.
_SETTINGS = {
    "force_parameter_static_shapes": False,
    "force_nn_module_property_static_shapes": False,
    "recompile_limit": 64,
}


class CompiledBackbone:
    """Runs the backbone compiled, for the calls that can be; options as for `torch.compile`."""

    def __init__(self, options: dict[str, Any]) -> None:
        # torch counts graphs by code object: each network has its own, so they share no limit.
        function = types.FunctionType(_run.__code__.replace(), _run.__globals__)
        self._run = torch.compile(function, fullgraph=True, **options)
        self._works = True

    def __call__(
        self, call: Call, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the backbone computes in this call.

        Where torch cannot compile it, run it uncompiled, with a warning that says why.
        """
        if not self._works or not _can_compile(call):
            return call.backbone(backbone)(*args, **kwargs)
        try:
            with _SETTINGS_INSIDE:
                return self._run(backbone, call, args, kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            out = backbone(*args, **kwargs)  # an error of the call itself is raised here
            self._works = isinstance(error, FailOnRecompileLimitHit)
            name = call.domains[0].name
            if self._works:
                why = (
                    f"domain {name!r} runs uncompiled here: its graph would be one more than the "
                    "limit. Domains with adapters of the same kind share graphs."
                )
            else:
                line = next(filter(None, str(error).splitlines()), type(error).__name__)
                why = (
                    f"the network runs uncompiled from domain {name!r} on: torch cannot compile "
                    f"its backbone as one graph ({line}). Leave net.compile_() out, or change that."
                )
            warnings.warn(why, CovNormWarning, stacklevel=2)
            return out


def _run(backbone: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the backbone in a call. Compiled whole, no other thread ever sees `TRACED`'s call."""
    TRACED.call = call
    out = backbone(*args, **kwargs)
    TRACED.call = None
    return out


def _can_compile(call: Call) -> bool:
    """Return whether the call runs one domain, which has all parts and replaces no weights."""
    domain = call.domains[0]
    whole = not domain.weights and not isinstance(domain.adapters, DroppedModules)
    return call.places is None and whole and not runs_stepwise()


class _CompilerSettings(contextlib.AbstractContextManager[None]):
    """Apply `_SETTINGS` inside. They are global: the first thread sets, the last restores them."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            if self._threads == 0:
                self._before = {name: getattr(torch._dynamo.config, name) for name in _SETTINGS}
                self._set(_SETTINGS)
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                self._set(self._before)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(torch._dynamo.config, name, value)


_SETTINGS_INSIDE = _CompilerSettings()


_REMEDY = (
    "torch.compile would compile this network again for every domain: call net.compile_() instead, "
    "which takes the options of torch.compile and compiles once for all"
)


@torch.compiler.disable
def outside_graph(net: nn.Module, compiled: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a network that a graph around it calls: compiled by itself, or not at all."""
    if not compiled:
        raise CovNormError(_REMEDY)
    return net(*args, **kwargs)


outside_graph._torchdynamo_disable_msg = _REMEDY  # what torch says with fullgraph=True
