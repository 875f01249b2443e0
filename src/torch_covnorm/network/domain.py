"""A domain: one named task, and everything that belongs to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol

from torch import Tensor, nn

from ..adapters import Adapter, LinearMap, MaskWeights, Site, WeightAdapter
from ..errors import CovNormError
from .modulemap import ModuleMap
from .prepared import DroppedModules, Prepared, prepare

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Network(Protocol):
    """The attributes of `MultiDomainNetwork` that the modules before it use."""

    backbone: nn.Module
    head_name: str | None
    sites: dict[str, Site]
    bases: ModuleMap
    fingerprint: str
    training: bool


class Domain(nn.Module):
    """Adapters by site, norms by their names in the backbone, head, class names.

    Norms of the backbone that are not among `norms` are shared.
    own: a further module of the domain. preprocessing: any JSON value that describes how images
    become inputs; it is saved with the domain. weights: replacements for the weights of layers
    (FNFT, Piggyback), by layer. basis: the name of the basis that a domain of joint mode shares.
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
        self.prepared: Prepared | None = None

    def train(self, mode: bool = True) -> Domain:
        """Set training or eval mode. Training discards what was prepared for inference."""
        self.prepared = None if mode else self.prepared
        return super().train(mode)

    def prepare_(self, sites: Mapping[str, Site], like: Tensor, only: bool) -> None:
        """Set eval mode and prepare it for many batches; see `MultiDomainNetwork.prepare_`.

        only: keep what was prepared, the head, weights and `own` module, and the norms without
        running statistics, which cannot be prepared. Drop the rest.
        """
        self.eval()
        adapters, norms = dict(self.adapters.items()), dict(self.norms.items())
        self.prepared = prepare(adapters, norms, sites, like, keep=self.basis is not None)
        if only:
            done = self.prepared.norms.channels
            rest = {n: norm for n, norm in norms.items() if n not in done}
            self.norms = DroppedModules(self.name, rest)
            self.adapters = DroppedModules(self.name)

    def _apply(self, fn: Any, recurse: bool = True) -> Domain:
        super()._apply(fn, recurse)
        self.prepared = self.prepared and self.prepared.map(fn)
        return self

    def has_norm(self, name: str) -> bool:
        """Return whether the domain has a copy of this norm of the backbone."""
        prepared = self.prepared
        return name in self.norms or (prepared is not None and name in prepared.norms.channels)

    @property
    def runs_own(self) -> bool:
        """Whether the own module runs on the backbone's output; a container does not."""
        return self.own is not None and not isinstance(self.own, nn.ModuleDict | nn.ModuleList)

    @property
    def width(self) -> int | None:
        """The number of outputs of the head."""
        return None if self.head is None else len(self.head.get_parameter("weight"))

    def extra_repr(self) -> str:
        return f"{self.name!r}, classes={None if self.classes is None else len(self.classes)}"

    def parameter_counts(self) -> dict[str, int]:
        """Return the parameters by category, without masks; `Account` describes the categories."""
        copied = count(self.weights) - sum(count(mask) for mask in self.masks)
        return {
            "adapter": sum(A.paper_count() for A in self.maps.values()) + copied,
            "bias": sum(A.bias.numel() for A in self.maps.values()),
            "norm": sum(map(count, self.all_norms)),
            "head": count(self.head),
            "own": count(self.own),
        }

    def num_parameters(self) -> dict[str, int]:
        """Return ``{"adapter", "norm", "head", "total"}``.

        "adapter" is the paper's count: matrices, copied weights, and 1/32 per bit of a mask. "norm"
        is the affine part. "total" also has the biases of adapters and the `own` module. Running
        statistics are buffers and do not count. `account` also counts what a basis shares.
        """
        counts = self.parameter_counts()
        masks = -(-sum(mask.bits() for mask in self.masks) // 32)
        return {
            "adapter": counts["adapter"] + masks,
            "norm": counts["norm"],
            "head": counts["head"],
            "total": sum(counts.values()) + masks,
        }

    @property
    def bytes(self) -> int:
        """Bytes of memory of its state and of what was prepared, without a shared basis."""
        tensors = [*self.state_dict().values()]
        tensors += [] if self.prepared is None else self.prepared.tensors
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def all_norms(self) -> list[nn.Module]:
        """The norms in the place of the backbone's, and B1 and B2 of all adapters."""
        return [self.norms, *(b for a in self.adapters.values() for b in (a.B1, a.B2))]

    @property
    def maps(self) -> dict[str, LinearMap]:
        """{site: A}, for the sites whose adapter has an A."""
        return {site: a.A for site, a in self.adapters.items() if a.A is not None}

    @property
    def masks(self) -> list[MaskWeights]:
        """The masks on weights of the backbone."""
        return [w for w in self.weights.values() if isinstance(w, MaskWeights)]

    def pack_(self) -> None:
        """Keep masks as 1 bit per weight, and drop the scores that trained them."""
        for mask in self.masks:
            mask.pack_()

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors to write to a file, by name: the state, with packed masks."""
        state = {k: v for k, v in self.state_dict().items() if not k.startswith("weights.")}
        for name, weight in self.weights.items():
            prefix = f"weights.{name.replace('.', '/')}"
            state.update({f"{prefix}.{k}": v for k, v in weight.stored().items()})
        return state


def check_name(name: object) -> str:
    """Return the name of a domain or basis if it is safe in paths and URLs."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CovNormError(
            f"domain name {name!r} is not valid: use 1–64 of a–z, 0–9, '.', '_', '-', starting "
            "with a letter or digit"
        )
    return name


def class_names(classes: Sequence[str] | int | None) -> tuple[str, ...] | None:
    """Return class names as a tuple; a number n gives "0" … "n-1"."""
    if classes is None:
        return None
    if isinstance(classes, bool | str):
        raise CovNormError(f"classes={classes!r}: give a list of names or a number")
    listed = range(int(classes)) if isinstance(classes, Integral | int) else classes
    names = tuple(map(str, listed))
    if not names or len(set(names)) != len(names):
        raise CovNormError(f"classes={classes!r}: give at least one class, and each name only once")
    return names


def count(module: nn.Module | None) -> int:
    """Return the number of parameters of a module; 0 for None."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())
