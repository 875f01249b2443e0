"""A domain: one named task, with all that it owns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from ..adapters import Adapter, LinearMap, MaskWeights, WeightAdapter
from ..errors import CovNormError
from .modulemap import ModuleMap
from .prepared import Prepared

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Domain(nn.Module):
    """Adapters by site, norms by the backbone's names, head, class names, what else is its own.

    `preprocessing` is any JSON value that says how images become inputs; it travels with the files.
    `weights` are for domains that change the backbone's layers (FNFT, Piggyback), by layer; `basis`
    names what a domain of joint mode shares with others.
    """

    def __init__(
        self,
        name: str,
        adapters: dict[str, Adapter],
        norms: dict[str, nn.Module],
        head: nn.Module | None,
        classes: tuple[str, ...] | None,
        own: nn.Module | None,
        preprocessing: Any,
        weights: Mapping[str, WeightAdapter] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.adapters = ModuleMap(dict(adapters))
        self.norms = ModuleMap(norms)
        self.weights = ModuleMap(weights)
        self.basis: str | None = None
        self.head = head
        self.own = own
        self.classes = classes
        self.preprocessing = preprocessing
        self.prepared: Prepared | None = None  # `MultiDomainNetwork.prepare_`

    def train(self, mode: bool = True) -> Domain:
        """Training forgets what was prepared for inference."""
        self.prepared = None if mode else self.prepared
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Domain:
        super()._apply(fn, recurse)
        self.prepared = self.prepared and self.prepared.moved(fn)
        return self

    @property
    def runs_own(self) -> bool:
        """Its own module runs on what the backbone returns; a container of modules does not."""
        return self.own is not None and not isinstance(self.own, nn.ModuleDict | nn.ModuleList)

    @property
    def width(self) -> int | None:
        """How many numbers its head answers."""
        return None if self.head is None else len(self.head.get_parameter("weight"))

    def extra_repr(self) -> str:
        return f"{self.name!r}, classes={None if self.classes is None else len(self.classes)}"

    def num_parameters(self) -> dict[str, int]:
        """``adapter`` as the paper counts (matrices), ``norm`` (affine), ``head``, and ``total``.

        Weights of the domain's own count as adapter: a copy as it is, a mask's bit as 1/32. The
        total is every parameter that the domain ships: biases of adapters and its `own` module
        too. Running statistics are buffers: they are in the file, not in this count. What a basis
        shares is the network's: `cn.account` has it.
        """
        adapters = [a for _, a in self.adapters.items()]
        norms = [self.norms, *(b for a in adapters for b in (a.B1, a.B2))]
        masks = sum(mask.bits() for mask in self.masks)
        weights = count(self.weights) - sum(count(mask) for mask in self.masks) + -(-masks // 32)
        return {
            "adapter": sum(a.paper_count() for a in adapters) + weights,
            "norm": sum(count(n) for n in norms),
            "head": count(self.head),
            "total": count(self) - count(self.weights) + weights,
        }

    @property
    def bytes(self) -> int:
        """Of memory: its state and what was prepared of it, each tensor once. A shared basis is the
        network's."""
        tensors = [*self.state_dict().values()]
        tensors += [] if self.prepared is None else self.prepared.tensors
        places = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in places.values())

    @property
    def maps(self) -> dict[str, LinearMap]:
        """{site: A}, at the sites whose adapter has one."""
        return {site: a.A for site, a in self.adapters.items() if a.A is not None}

    @property
    def masks(self) -> list[MaskWeights]:
        """Its masks on weights of the backbone."""
        return [w for _, w in self.weights.items() if isinstance(w, MaskWeights)]

    def pack_(self) -> None:
        """Keep masks as 1 bit a weight, without the scores that trained them."""
        for mask in self.masks:
            mask.pack_()

    def stored(self) -> dict[str, Tensor]:
        """The tensors of its file, by name: its state, with masks packed."""
        state = {k: v for k, v in self.state_dict().items() if not k.startswith("weights.")}
        for name, weight in self.weights.items():
            prefix = f"weights.{name.replace('.', '/')}"
            state.update({f"{prefix}.{k}": v for k, v in weight.stored().items()})
        return state


def check_name(name: object) -> str:
    """Names become parts of paths and URLs later: only what is safe there."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CovNormError(
            f"domain name {name!r}: use 1–64 of a–z, 0–9, '.', '_', '-', beginning with a letter "
            "or digit"
        )
    return name


def fresh_head(layer: nn.Linear | nn.Conv2d, classes: int) -> nn.Module:
    """A new head in the place of a Linear or Conv2d layer."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, classes)
    return nn.Conv2d(  # a head of groups becomes one of all
        layer.in_channels,
        classes,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        padding_mode=layer.padding_mode,
    )


def class_names(classes: Sequence[str] | int | None) -> tuple[str, ...] | None:
    """Class names as a tuple; a number gives "0", "1", …"""
    if classes is None:
        return None
    if isinstance(classes, bool | str):
        raise CovNormError(f"classes={classes!r}: give a list of names, or how many")
    listed = range(int(classes)) if isinstance(classes, Integral | int) else classes
    names = tuple(map(str, listed))
    if not names or len(set(names)) != len(names):
        raise CovNormError(f"classes={classes!r}: give at least one, each name once")
    return names


def count(module: nn.Module | None) -> int:
    """Parameters of a module, or of none."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())
