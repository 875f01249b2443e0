"""What a domain costs: parameters and bytes by category, and shares of named denominators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import CovNormError, choices
from .domain import Domain, count
from .network import MultiDomainNetwork

CATEGORIES = ("adapter", "bias", "norm", "head", "own", "mask", "shared")


@dataclass(frozen=True)
class Account:
    """The cost of one or several domains.

    parameters: by category. "adapter": matrices as the paper counts, and copied weights. "bias": of
        adapters. "norm": the affine part. "own": the domain's own module. "mask": in units of 32
        bits, rounded up. "shared": the bases, each once.
    mask_bits: 1 per masked weight.
    bytes: by category, in float32 files. "norm" has the running statistics too; masks are packed.
    denominators: the parameters of the "network", of its "convolutions", and of the adapters of
        method "ra" ("ra").
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
        """Return the parameters of these categories as a share of a named denominator."""
        for category in kinds:
            if category not in CATEGORIES:
                raise CovNormError(f"kind {category!r}: {choices(category, CATEGORIES)}")
        if of not in self.denominators:
            raise CovNormError(f"of={of!r}: {choices(of, self.denominators)}")
        return sum(self.parameters[k] for k in kinds) / max(self.denominators[of], 1)


def account(net: MultiDomainNetwork, names: str | Sequence[str]) -> Account:
    """Return the total cost of domains. What they share counts once."""
    names = [names] if isinstance(names, str) else list(names)
    if not names or len(set(names)) != len(names):
        raise CovNormError(f"names={names!r}: give at least one domain, and each only once")
    domains = [net.domain(name) for name in names]
    parameters, size, bits = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0), 0
    for domain in domains:
        buffers = _buffer_bytes(domain)
        for category, number in domain.parameter_counts().items():
            parameters[category] += number
            size[category] += 4 * number + buffers.get(category, 0)
        size["mask"] += sum(-(-mask.bits() // 8) for mask in domain.masks)
        bits += sum(mask.bits() for mask in domain.masks)
    parameters["mask"] = -(-bits // 32)
    for name in {d.basis for d in domains if d.basis is not None}:
        basis = net.basis(name)
        parameters["shared"] += basis.num_parameters()
        size["shared"] += sum(4 * b.numel() for b in basis.buffers())
    return Account(parameters, bits, size, denominators(net))


def denominators(net: MultiDomainNetwork) -> dict[str, int]:
    """Return what shares are shares of. The network includes its original head."""
    convolutions = [m for m in net.backbone.modules() if isinstance(m, nn.Conv2d)]
    return {
        "network": count(net.backbone),
        "convolutions": sum(count(m) for m in convolutions),
        "ra": sum(site.d_out**2 for site in net.sites.values()),
    }


def _buffer_bytes(domain: Domain) -> dict[str, int]:
    """Return the bytes of what a file holds besides parameters, by category."""
    own = [] if domain.own is None else domain.own.buffers()
    means = [b for A in domain.maps.values() for n, b in A.named_buffers() if n == "mu_x"]
    return {
        "norm": sum(_size(b) for norm in domain.all_norms for b in norm.buffers()),
        "bias": sum(map(_size, means)),  # mu_x, which CovNorm keeps until M is absorbed
        "own": sum(map(_size, own)),
    }


def _size(tensor: Tensor) -> int:
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())
