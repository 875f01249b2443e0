"""What a domain costs: parameters and bytes by kind, against denominators that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import CovNormError
from .domain import Domain, count
from .network import MultiDomainNetwork

KINDS = ("adapter", "bias", "norm", "head", "own", "mask", "shared")


@dataclass(frozen=True)
class Account:
    """The cost of one or several domains.

    parameters: by kind. "adapter" as the paper counts, the matrices (a fine-tuned copy of weights
        too); "bias" of the adapters; "norm" the affine part; "own" the domain's further module;
        "mask" in units of 32 bits, rounded up; "shared" the bases that they use, each once.
    mask_bits: 1 a masked weight.
    bytes: by kind, as float32 files hold them; "norm" with its running statistics, masks packed.
    denominators: parameters of the "network", of its "convolutions", and of the adapters that
        method "ra" would have ("ra").
    """

    parameters: dict[str, int]
    mask_bits: int
    bytes: dict[str, int]
    denominators: dict[str, int]

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())

    def share(
        self, of: str = "network", kinds: Sequence[str] = ("adapter", "mask", "shared")
    ) -> float:
        """These kinds of parameters as a share of a named denominator."""
        for kind in kinds:
            if kind not in self.parameters:
                raise CovNormError(f"kind {kind!r}: choose of {', '.join(KINDS)}")
        if of not in self.denominators:
            raise CovNormError(f"of={of!r}: choose one of {', '.join(self.denominators)}")
        return sum(self.parameters[k] for k in kinds) / max(self.denominators[of], 1)


def account(net: MultiDomainNetwork, names: str | Sequence[str]) -> Account:
    """What domains cost in all; what they share is counted once."""
    names = [names] if isinstance(names, str) else list(names)
    if not names or len(set(names)) != len(names):
        raise CovNormError(f"names={names!r}: give domains, each once")
    parameters, size, bits = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), 0
    for name in names:
        for kind, number in _parameters(net.domain(name)).items():
            parameters[kind] += number
            size[kind] += 4 * number
        for mask in net.domain(name).masks:
            bits += mask.bits()
            size["mask"] += -(-mask.bits() // 8)
        size["norm"] += _statistics(net.domain(name))
        size["bias"] += _centres(net.domain(name))
        own = net.domain(name).own
        size["own"] += 0 if own is None else sum(_size(b) for b in own.buffers())
    parameters["mask"] = -(-bits // 32)
    for basis in {net.domain(n).basis for n in names} - {None}:
        shared = net.basis(str(basis))
        parameters["shared"] += shared.num_parameters()
        size["shared"] += sum(4 * b.numel() for b in shared.buffers())
    return Account(parameters, bits, size, denominators(net))


def denominators(net: MultiDomainNetwork) -> dict[str, int]:
    """What shares are shares of; the network is counted with the head that it came with."""
    convolutions = [m for m in net.backbone.modules() if isinstance(m, nn.Conv2d)]
    return {
        "network": count(net.backbone),
        "convolutions": sum(count(m) for m in convolutions),
        "ra": sum(site.d_out**2 for site in net.sites.values()),
    }


def _parameters(domain: Domain) -> dict[str, int]:
    adapters = [a for _, a in domain.adapters.items()]
    own = count(domain.weights) - sum(count(mask) for mask in domain.masks)
    found = domain.num_parameters()
    return {
        "adapter": sum(a.paper_count() for a in adapters) + own,
        "bias": sum(A.bias.numel() for A in domain.maps.values()),
        "norm": found["norm"],
        "head": found["head"],
        "own": count(domain.own),
    }


def _statistics(domain: Domain) -> int:
    """Bytes of running statistics, with their counters."""
    parts = [domain.norms, *(b for _, a in domain.adapters.items() for b in (a.B1, a.B2))]
    return sum(_size(b) for part in parts for b in part.buffers())


def _centres(domain: Domain) -> int:
    """Bytes of the mu_x that CovNorm keeps until M is absorbed."""
    maps = domain.maps.values()
    return sum(_size(b) for A in maps for n, b in A.named_buffers() if n == "mu_x")


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())
