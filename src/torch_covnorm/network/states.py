"""Check the state dict of a whole network before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..errors import CovNormError

Shapes = dict[str, tuple[int, ...]]


def check_state(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Check that a state has the bases and domains of a network, with parts of the same shapes.

    ours, theirs: `state_dict` of the network, and the one to load into it.
    """
    here, there = _parts(ours, "bases"), _parts(theirs, "bases")
    if lacking := sorted(there.keys() - here.keys()):
        raise CovNormError(
            f"the state has a basis that this network lacks: {', '.join(lacking)}. Add it "
            "with net.load_basis(folder), then its domains with net.load_domain(folder)."
        )
    here, there = _parts(ours, "domains"), _parts(theirs, "domains")
    if lacking := sorted(there.keys() - here.keys()):
        calls = "; ".join(f"net.add_domain({_arguments(n, there[n])})" for n in lacking)
        raise CovNormError(
            f"the state has domains that this network lacks: {', '.join(lacking)}. Add them with "
            f"the adapter= that they had, then load it: {calls}"
        )
    if lacking := sorted(here.keys() - there.keys()):
        raise CovNormError(
            f"the state has nothing for the domains {', '.join(lacking)} of this network. Remove "
            "them with net.remove_domain, or load with strict=False."
        )
    for name, shapes in there.items():
        differ = sorted(k for k in here[name] | shapes if here[name].get(k) != shapes.get(k))
        if differ:
            part = differ[0]
            raise CovNormError(
                f"domain {name!r}: {part} is {shapes.get(part, 'missing')} in the state and "
                f"{here[name].get(part, 'missing')} in this network ({len(differ)} such parts). "
                "Add the domain with the adapter=, rank=, classes=, norms= and own= that it had. "
                "One that was compressed loads only from a folder (save_domain, load_domain)."
            )


def _parts(state: Mapping[str, Tensor], kind: str) -> dict[str, Shapes]:
    """Return {domain or basis: {name of a tensor: shape}}; `ModuleMap` writes "." as "/"."""
    parts: dict[str, Shapes] = {}
    for key, tensor in state.items():
        first, _, rest = key.partition(".")
        name, _, tensor_name = rest.partition(".")
        if first == kind:
            parts.setdefault(name.replace("/", "."), {})[tensor_name] = tuple(tensor.shape)
    return parts


def _arguments(name: str, shapes: Shapes) -> str:
    head = shapes.get("head.weight")
    return repr(name) if head is None else f"{name!r}, classes={head[0]}"
