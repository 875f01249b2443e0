"""What the domains of joint mode share: one C and W per site, and the moments to extend them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from .. import records
from ..adapters import SharedFactors
from ..errors import CovNormError, at_site
from ..stats.moments import Moments
from ..stats.pooling import LossMetric
from .domain import Network
from .modulemap import ModuleMap

FORMAT = "torch-covnorm basis"
RECORD = "basis.json"
Factorization = Literal["covnorm", "svd"]


class Basis(nn.Module):
    """W, C and mu_x at every site, shared by all domains of the basis; see ``net.bases``.

    `x` and `y` hold the global (N, mu, Sigma) of eq. 10 by site: all that a further domain needs
    to join, in constant space. In the metric of the loss, `felt` holds its sums by site, which are
    needed too. Joint SVD keeps none of these.
    """

    def __init__(
        self,
        name: str,
        decomposition: Factorization,
        factors: Mapping[str, SharedFactors],
        x: dict[str, Moments] | None = None,
        y: dict[str, Moments] | None = None,
        settings: dict[str, Any] | None = None,
        felt: dict[str, LossMetric] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.decomposition = decomposition
        self.factors = ModuleMap(factors)
        self.x = x or {}
        self.y = y or {}
        self.settings = settings or {}
        self.felt = felt or {}

    def extra_repr(self) -> str:
        """Return what `print` shows of it."""
        return f"{self.name!r}, {self.decomposition}, {self.num_parameters():,} shared"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the current factors."""
        return records.digest({k: v.float() for k, v in self.factors.state_dict().items()})

    @property
    def seen(self) -> int:
        """N of eq. 10: rows of features from all domains; 0 if no moments are kept."""
        return max((int(m.n) for m in self.x.values()), default=0)

    def num_parameters(self) -> int:
        """Return the number of entries of all W and C."""
        shared = (t for f in self.factors.values() for t in (f.W, f.C))
        return sum(t.numel() for t in shared if t is not None)

    @property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """{site: (kx, ky)}."""
        return {site: f.ranks for site, f in self.factors.items()}


def save(net: Network, basis: Basis, folder: Path) -> Path:
    """Write a basis with its moments into a folder: safetensors and JSON."""
    record, factors, moments = packed(net, basis)
    tensors = dict(sorted({**factors, **moments}.items()))
    records.write(folder / RECORD, FORMAT, record, tensors)
    return folder


def load(net: Network, folder: Path) -> Basis:
    """Read and check a basis from a folder. The network does not change."""
    file = folder / RECORD
    record = records.read(file, FORMAT)
    tensors = records.read_tensors(file, record)
    with records.blame(file):
        return unpacked(net, record, tensors)


def packed(
    net: Network, basis: Basis
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return a basis as plain JSON, factors and moments by name. `unpacked` does the reverse.

    Factors are named ``site/W``, ``site/C`` and ``site/mu_x``; moments ``site/x/…``, ``site/y/…``
    and ``site/felt/…``.
    """
    factors: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for site, shared in basis.factors.items():
        for key, value in shared.state_dict().items():
            factors[f"{site}/{key}"] = value.detach().cpu().float().contiguous()
    for side, by_site in (("x", basis.x), ("y", basis.y)):
        for site, m in by_site.items():
            moments.update({f"{site}/{side}/{k}": v.cpu() for k, v in m.state_dict().items()})
    for site, loss in basis.felt.items():
        moments.update({f"{site}/felt/{k}": v.contiguous() for k, v in loss._asdict().items()})
    record = {
        "name": basis.name,
        "kind": basis.decomposition,
        "settings": basis.settings,
        "fingerprint": basis.fingerprint,
        "backbone": {"class": type(net.backbone).__name__, "fingerprint": net.fingerprint},
        "sites": list(basis.factors),
    }
    return record, dict(sorted(factors.items())), dict(sorted(moments.items()))


def rows_seen(moments: Mapping[str, Tensor]) -> int:
    """Return `Basis.seen` from the moments of a packed basis."""
    return max((int(n) for key, n in moments.items() if key.endswith("/x/n")), default=0)


def unpacked(net: Network, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> Basis:
    """Return a basis from its record and all its tensors. The network does not change."""
    if record["backbone"]["fingerprint"] != net.fingerprint:
        raise CovNormError("was made for another backbone: load it into a network on that backbone")
    if record["kind"] not in get_args(Factorization):
        raise CovNormError(f"has the unknown kind {record['kind']!r}: update torch-covnorm")
    if other := set(record["sites"]) - set(net.sites):
        raise CovNormError(
            f"has sites that this network does not have ({', '.join(sorted(other)[:4])}): build "
            "the network with the same sites="
        )
    basis = Basis(record["name"], record["kind"], {}, settings=record["settings"])
    for site in record["sites"]:
        start = f"{site}/"
        parts = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
        with at_site(site):
            if not all(t.isfinite().all() for t in parts.values()):
                raise CovNormError("contains NaN or Inf")
            basis.factors[site] = _factors(parts, net.sites[site].d_out)
        for side, moments in (("x", basis.x), ("y", basis.y)):
            if f"{side}/n" in parts:
                moments[site] = Moments(len(parts[f"{side}/mean"]))
                keys = moments[site].state_dict()
                moments[site].load_state_dict({k: parts[f"{side}/{k}"] for k in keys})
        if "felt/G" in parts:
            basis.felt[site] = LossMetric(*(parts[f"felt/{k}"] for k in LossMetric._fields))
    if basis.fingerprint != record["fingerprint"]:
        raise CovNormError("is damaged (its fingerprint differs): restore it from a copy")
    anchor = next(net.backbone.parameters())
    return basis.to(anchor.device, anchor.dtype)


def _factors(parts: Mapping[str, Tensor], d_out: int) -> SharedFactors:
    W, C, mu_x = parts["W"], parts.get("C"), parts["mu_x"]
    good = W.ndim == 2 and mu_x.shape == W.shape[1:] and len(W) <= W.shape[1]
    if not good or (C is not None and (C.ndim != 2 or len(C) != d_out)):
        raise CovNormError("its factors have the wrong shape")
    return SharedFactors(W, C, mu_x)
