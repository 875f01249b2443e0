"""What the domains of joint mode share: one C and W for all, and the moments they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn

from .. import records
from ..adapters import SharedFactors
from ..errors import CovNormError
from ..stats.moments import Moments
from ..stats.pooling import Felt
from .modulemap import ModuleMap

if TYPE_CHECKING:
    from .network import MultiDomainNetwork

FORMAT = "torch-covnorm basis"
RECORD = "basis.json"
Kind = Literal["covnorm", "svd"]


class Basis(nn.Module):
    """W, C and mu_x at every site, once for all its domains; kept in ``net.bases``.

    `x` and `y` hold the global (N, mu, Sigma) of eq. 10 by site: constant storage, whatever the
    number of domains, and all that a further domain needs; in the metric of the loss, `felt` too.
    Joint SVD keeps none.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        factors: Mapping[str, SharedFactors],
        x: dict[str, Moments] | None = None,
        y: dict[str, Moments] | None = None,
        settings: dict[str, Any] | None = None,
        felt: dict[str, Felt] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.kind = kind
        self.factors = ModuleMap(factors)
        self.x = x or {}
        self.y = y or {}
        self.settings = settings or {}
        self.felt = felt or {}

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"{self.name!r}, {self.kind}, {self.num_parameters():,} shared"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the factors as they are now."""
        return records.digest({k: v.float() for k, v in self.factors.state_dict().items()})

    @property
    def seen(self) -> int:
        """N of eq. 10: rows of features of all its domains; 0 where none are kept."""
        return max((int(m.n) for m in self.x.values()), default=0)

    def num_parameters(self) -> int:
        """The numbers of all W and C."""
        return sum(f.numbers() for _, f in self.factors.items())

    @property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """{site: (kx, ky)}."""
        return {site: f.ranks for site, f in self.factors.items()}


def save(net: MultiDomainNetwork, basis: Basis, folder: Path) -> Path:
    """Write a basis with its moments into a folder: safetensors and JSON."""
    record, tensors = packed(net, basis)
    records.write(folder / RECORD, FORMAT, record, tensors)
    return folder


def load(net: MultiDomainNetwork, folder: Path) -> Basis:
    """A basis, made beside the network from the files in a folder, all of it checked."""
    file = folder / RECORD
    record = records.read(file, FORMAT)
    tensors = records.read_tensors(file, record)
    with records.blame(file):
        return unpacked(net, record, tensors)


def packed(net: MultiDomainNetwork, basis: Basis) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A basis as plain JSON and tensors by name; `unpacked` is the way back."""
    tensors: dict[str, Tensor] = {}
    for site, factors in basis.factors.items():
        for key, value in factors.state_dict().items():
            tensors[f"{site}/{key}"] = value.detach().cpu().float().contiguous()
    for side, moments in (("x", basis.x), ("y", basis.y)):
        for site, m in moments.items():
            tensors.update({f"{site}/{side}/{k}": v.cpu() for k, v in m.state_dict().items()})
    for site, felt in basis.felt.items():
        tensors.update({f"{site}/felt/{k}": v.contiguous() for k, v in felt._asdict().items()})
    record = {
        "name": basis.name,
        "kind": basis.kind,
        "settings": basis.settings,
        "fingerprint": basis.fingerprint,
        "backbone": {"class": type(net.backbone).__name__, "fingerprint": net.fingerprint},
        "sites": list(basis.factors),
    }
    return record, dict(sorted(tensors.items()))


def unpacked(net: MultiDomainNetwork, record: dict[str, Any], tensors: dict[str, Tensor]) -> Basis:
    """A basis, made beside the network."""
    if record["backbone"]["fingerprint"] != net.fingerprint:
        raise CovNormError("was made for another backbone")
    if record["kind"] not in get_args(Kind) or set(record["sites"]) - set(net.sites):
        raise CovNormError("has another kind or other sites than this network")
    factors: dict[str, SharedFactors] = {}
    x: dict[str, Moments] = {}
    y: dict[str, Moments] = {}
    felt: dict[str, Felt] = {}
    for site in record["sites"]:
        if not all(t.isfinite().all() for k, t in tensors.items() if k.startswith(f"{site}/")):
            raise CovNormError(f"site {site!r}: holds NaN or Inf")
        parts = (tensors[f"{site}/W"], tensors.get(f"{site}/C"), tensors[f"{site}/mu_x"])
        factors[site] = _checked(SharedFactors(*parts), net.sites[site].d_out, site)
        for side, moments in (("x", x), ("y", y)):
            if f"{site}/{side}/n" in tensors:
                moments[site] = Moments(len(tensors[f"{site}/{side}/mean"]))
                keys = moments[site].state_dict()
                moments[site].load_state_dict({k: tensors[f"{site}/{side}/{k}"] for k in keys})
        if f"{site}/felt/G" in tensors:
            felt[site] = Felt(*(tensors[f"{site}/felt/{k}"] for k in Felt._fields))
    basis = Basis(record["name"], record["kind"], factors, x, y, record["settings"], felt)
    if basis.fingerprint != record["fingerprint"]:
        raise CovNormError("is damaged (its fingerprint differs): restore it from a copy")
    anchor = next(net.backbone.parameters())
    return basis.to(anchor.device, anchor.dtype)


def _checked(factors: SharedFactors, d_out: int, site: str) -> SharedFactors:
    W, C, mu_x = factors.W, factors.C, factors.mu_x
    good = W.ndim == 2 and mu_x.shape == W.shape[1:] and len(W) <= W.shape[1]
    if not good or (C is not None and (C.ndim != 2 or len(C) != d_out)):
        raise CovNormError(f"site {site!r}: factors of the wrong shape")
    return factors
