"""Read files of weights, and find out which of their tensors is which of a network's.

A file and a network may name the same tensors differently. They are matched by their exact names
(without prefixes such as ``module.``), then by known names of other programs, then by order and
shape. What could be matched in two ways, or not at all, is refused.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..errors import CovNormError

WRAPPERS = ("state_dict", "model", "model_state_dict")  # under which training programs save it
PREFIX_PARTS = 3  # of a prefix such as "module.model.backbone." at most
COUNTER = "num_batches_tracked"  # of a BatchNorm; eval mode ignores it, and some programs drop it

Shapes = Mapping[str, Tensor]


class Mismatch(CovNormError):
    """The tensors are not those of the network."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a file by name. ordered: whether the file keeps the order of the network."""

    file: Path
    tensors: dict[str, Tensor]
    ordered: bool


@dataclass(frozen=True)
class Build:
    """How to make a network for a state dict.

    make: number of classes → network. head: the layer that a file may lack, or have for another
    number of classes. renames: {layer elsewhere: ours}, one per program.
    """

    make: Callable[[int], nn.Module]
    head: str
    renames: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Matched:
    """Which tensor of a file each tensor of a network is: {ours: theirs}, by how it was found."""

    by_name: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    by_order: dict[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> dict[str, str]:
        """{ours: theirs}."""
        return self.by_name | self.renamed | self.by_order

    def __str__(self) -> str:
        found = {"by name": self.by_name, "by known names": self.renamed}
        found["by order and shape"] = self.by_order
        parts = [f"{len(pairs)} {how}" for how, pairs in found.items() if pairs]
        return f"{len(self.pairs)} tensors: {', '.join(parts)}"

    def record(self) -> dict[str, Any]:
        """Return the counts, and every pair whose names differ, as plain JSON."""
        renamed = {k: v for k, v in self.by_name.items() if k != v} | self.renamed
        counts = {"tensors": len(self.pairs), "by_name": len(self.by_name)}
        return {**counts, "renamed": renamed, "by_order": self.by_order}


def read_weights(file: Path) -> Weights:
    """Read tensors by name from a .safetensors or torch file, without unpickling any code."""
    state: Any
    try:
        if file.suffix == ".safetensors":  # sorted by name, whatever order they were saved in
            return Weights(file, safetensors.torch.load_file(file), ordered=False)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise many types; all of them mean this file
        raise CovNormError(f"{file}: cannot be read as weights ({error})") from error
    while isinstance(state, dict) and (
        inner := next((state[w] for w in WRAPPERS if isinstance(state.get(w), dict)), None)
    ):
        state = inner
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise CovNormError(f"{file}: no state dict in it. Save tensors by name.")
    return Weights(file, {str(k): v for k, v in state.items()}, ordered=True)


def built(
    build: Build, weights: Weights, name: str, by_order: bool = True
) -> tuple[nn.Module, Matched]:
    """Make a network for the classes of a file, and load it. The file may lack the head.

    name: how errors call the network.
    """
    with torch.device("meta"):
        names = build.make(1000).state_dict()
    known = _translated(names, weights.tensors, build.renames)
    head = f"{build.head}.weight"
    if head in known:
        classes: int | None = len(weights.tensors[known[head]])
    else:  # by order, it is the last Linear of its width
        left = (t for k, t in weights.tensors.items() if k not in known.values() and by_order)
        width = names[head].shape[1]
        classes = next((len(t) for t in reversed([*left]) if t.shape[1:] == (width,)), None)
    net = build.make(classes or 1000)
    optional = {head, f"{build.head}.bias"} if classes is None else set()
    return net, load_(net, weights, name, build.renames, optional, by_order)


def load_(
    net: nn.Module,
    weights: Weights,
    name: str,
    renames: Sequence[Mapping[str, str]] = (),
    optional: Iterable[str] = (),
    by_order: bool = True,
) -> Matched:
    """Load a file into a network; return what was matched. On an error the network stays as it was.

    optional: tensors of the network that the file may lack.
    """
    ours = net.state_dict()
    try:
        matched = match(ours, weights, renames, optional, by_order)
    except Mismatch as error:
        raise Mismatch(f"{weights.file}: not the weights of {name}: {error}") from None
    state = {k: _fitted(weights.tensors[v], ours[k]) for k, v in matched.pairs.items()}
    net.load_state_dict(state, strict=False)
    return matched


def match(
    ours: Shapes,
    weights: Weights,
    renames: Sequence[Mapping[str, str]] = (),
    optional: Iterable[str] = (),
    by_order: bool = True,
) -> Matched:
    """Return which tensor of a file each tensor of a network is; refuse any doubt."""
    theirs, matched = weights.tensors, Matched()
    known = _translated(ours, theirs, renames)
    for name, theirs_name in known.items():
        if _fitted(theirs[theirs_name], ours[name]) is None:
            raise Mismatch(
                f"{_shown(theirs_name, theirs)} is not {_shown(name, ours)} of the network"
            )
        same = theirs_name == name or theirs_name.endswith(f".{name}")
        (matched.by_name if same else matched.renamed)[name] = theirs_name
    used = set(known.values())
    open_ = [k for k in ours if k not in known and not k.endswith(COUNTER)]
    left = [k for k in theirs if k not in used and not k.endswith(COUNTER)]
    if not left and set(open_) <= set(optional):
        return matched
    if not by_order or not open_ or not left:
        raise Mismatch(
            f"has no {_shown(open_[0], ours)}"
            if open_
            else f"has {_shown(left[0], theirs)}, which the network lacks"
        )
    for layer, other in _by_order(ours, theirs, open_, left, weights.ordered).items():
        for name in (k for k in ours if _layer(k) == layer):
            if (theirs_name := f"{other}.{_end(name)}" if other else _end(name)) in theirs:
                matched.by_order[name] = theirs_name
    return matched


def _translated(
    ours: Shapes, theirs: Shapes, renames: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return {ours: theirs} for the prefix and the renames that find the most of our names."""
    best: dict[str, str] = {}
    for parts in _prefixes(theirs):
        for layers in ({}, *renames):
            found: dict[str, str] = {}
            for key in theirs:
                short = key
                for part in parts:
                    short = short.removeprefix(part)
                layer = _layer(short)
                name = f"{layers[layer]}.{_end(short)}" if layer in layers else short
                if name in ours:
                    if name in found:
                        raise Mismatch(f"{found[name]!r} and {key!r} have the same name inside")
                    found[name] = key
            if len(found) > len(best):
                best = found
    return best


def _prefixes(theirs: Shapes) -> list[tuple[str, ...]]:
    """Return the prefixes that most names share, in parts: (), ("module.",), …"""
    prefixes: list[tuple[str, ...]] = [()]
    split = [tuple(f"{part}." for part in key.split(".")) for key in theirs]
    for n in range(1, PREFIX_PARTS + 1):
        counts = Counter(parts[:n] for parts in split if len(parts) > n + 1)
        prefixes += [parts for parts, count in counts.items() if 2 * count > len(theirs)]
    return prefixes


def _by_order(
    ours: Shapes, theirs: Shapes, open_: list[str], left: list[str], ordered: bool
) -> dict[str, str]:
    """Return {our layer: theirs}: the layers with equal tensors, in order."""
    layers, others = _signatures(ours, open_), _signatures(theirs, left)
    if ordered:
        for mine, its in itertools.zip_longest(layers, others):
            if layers.get(mine) != others.get(its):
                raise Mismatch(f"{_text(its, others)} is in the place of {_text(mine, layers)}")
    else:
        others = dict(sorted(others.items(), key=lambda pair: _tokens(pair[0])))
    pairs: dict[str, str] = {}
    for signature in dict.fromkeys([*layers.values(), *others.values()]):
        group = [layer for layer, found in layers.items() if found == signature]
        alike = [layer for layer, found in others.items() if found == signature]
        if len(group) != len(alike):
            example = _text(group[0], layers) if group else _text(alike[0], others)
            raise Mismatch(f"has {len(alike)} layers like {example}, the network {len(group)}")
        _check_order(alike, ordered)
        pairs |= zip(group, alike, strict=True)
    return pairs


def _check_order(layers: list[str], ordered: bool) -> None:
    """Refuse layers of equal shapes whose names contradict their order, or give none."""
    for a, b in itertools.combinations(layers, 2):
        x, y = next(
            ((x, y) for x, y in zip(_tokens(a), _tokens(b), strict=False) if x != y), ("", "")
        )
        if isinstance(x, int) and isinstance(y, int):
            if x > y:
                raise Mismatch(f"{a!r} comes before {b!r}, which has the same shape: sort them")
        elif not ordered:
            raise Mismatch(
                f"{a!r} and {b!r} have the same shape, and a .safetensors file has no order: "
                "rename them, or save a .pth file"
            )


def _signatures(tensors: Shapes, names: list[str]) -> dict[str, tuple[Any, ...]]:
    """Return {layer: the names and shapes of its tensors}, in order."""
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name in names:
        layers.setdefault(_layer(name), []).append((_end(name), tuple(tensors[name].shape)))
    return {layer: tuple(sorted(parts)) for layer, parts in layers.items()}


def _fitted(tensor: Tensor, like: Tensor) -> Tensor | None:
    """Return a tensor in the shape of another; None if it is not the same tensor.

    A convolution over its whole input and a Linear layer hold the same numbers in the same order.
    """
    if tensor.shape == like.shape:
        return tensor
    kernels = {tensor.ndim, like.ndim} == {2, 4} and tensor.numel() == like.numel()
    return tensor.reshape(like.shape) if kernels and len(tensor) == len(like) else None


def _tokens(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(name: str, tensors: Shapes) -> str:
    return f"{name!r} {tuple(tensors[name].shape)}"


def _text(layer: str | None, signatures: Mapping[str, tuple[Any, ...]]) -> str:
    if layer is None:
        return "nothing"
    return f"{layer!r} ({', '.join(f'{end} {shape}' for end, shape in signatures[layer])})"
