"""One frozen backbone, many domains."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..adapters import Adapter, WeightAdapter, build, fresh_config, own_weights, padded_share
from ..errors import CovNormError, choices
from . import basis as basis_files
from . import files
from .basis import Basis
from .domain import Domain, check_name, class_names, fresh_head
from .merge import merge
from .mixed import finish, groups, run_apart
from .modulemap import ModuleMap
from .prepared import let_go_, prepare
from .routing import Call, Role, check_plain, plain_copy, route_
from .sites import Layer, Site, SitePredicate, find_head, find_norms, find_sites, weight_layers


class MultiDomainNetwork(nn.Module):
    """A frozen backbone F with, for each domain, adapters A behind its sites (the paper's fig. 1).

    Args:
        backbone: any nn.Module. It is frozen and taken over, not copied; its weights never change.
        sites: predicate over (name, module) that picks Conv2d and Linear layers, else `default`.
        head: the layer that each domain replaces by its own: a name, "auto" for the last Linear,
            or None for a feature extractor.

    ``net(x, domain="a")`` runs one domain; ``net(x, domain=["a", "b", …])`` one a sample.
    """

    def __init__(
        self,
        backbone: nn.Module,
        sites: SitePredicate | None = None,
        head: str | None = "auto",
    ) -> None:
        super().__init__()
        self.head_name = find_head(backbone, head)
        self.sites: dict[str, Site] = find_sites(backbone, sites, self.head_name)
        norms = find_norms(backbone)
        self._neutral_norms: dict[str, nn.Module] = {
            n: _neutral(m) for n, m in norms.items() if type(m) not in _PLAIN_NORMS
        }
        self._roles: dict[nn.Module, Role] = {}
        for name, norm in norms.items():
            self._roles[norm] = ("norm", name)
        for name, site in self.sites.items():
            self._roles[backbone.get_submodule(name)] = ("site", site)
        if self.head_name is not None:
            self._roles[backbone.get_submodule(self.head_name)] = ("head", self.head_name)
        for layer in self._roles:
            check_plain(layer)
        for layer in self._roles:
            route_(layer)
        self.backbone = backbone.requires_grad_(False)
        self.bases = ModuleMap()  # before the domains, which refer to them
        self.domains = ModuleMap()
        self.fingerprint = files.fingerprint(backbone, self.head_name)
        self.register_load_state_dict_post_hook(_renew_fingerprint)
        self.train(backbone.training)

    # ── domains ──────────────────────────────────────────────────────────────────────────────

    def add_domain(
        self,
        name: str,
        classes: Sequence[str] | int | None = None,
        adapter: str = "residual",
        rank: int | float | None = None,
        own: nn.Module | None = None,
        preprocessing: Any = None,
    ) -> Domain:
        """Add a domain with fresh adapters, the backbone's norms as they are, and a fresh head.

        Args:
            classes: class names, or how many; needed where the backbone has a head and no `own`
                module takes its place.
            adapter: "residual", "parallel", "conv", "batchnorm", or "lowrank", which is residual
                with rank 0.25; "own" (a copy of the backbone's weights) or "mask" (1 bit for each),
                which change its layers and add none; "none" (norms and head alone).
            rank: make A a low-rank C·W: a number of directions, or a share of d in (0, 1).
            own: a further module of the domain, called on what the backbone returns (a container
                such as nn.ModuleDict is only kept, trained and saved with the domain).
            preprocessing: any JSON value; travels with the domain's files. Where none is given and
                the backbone has a dictionary of that name, that one.
        """
        self._check_new(name)
        adapters = self.fresh_adapters(adapter, rank)
        if preprocessing is None:
            given = getattr(self.backbone, "preprocessing", None)
            preprocessing = copy.deepcopy(given) if isinstance(given, dict) else None
        layers = weight_layers(self.backbone, adapter, self.head_name)
        weights = own_weights(adapter, layers) if layers else {}
        self.domains[name] = self.make_domain(name, adapters, classes, own, preprocessing, weights)
        return self.domain(name)

    def fresh_adapters(self, adapter: str, rank: int | float | None = None) -> dict[str, Adapter]:
        """Untrained adapters of a kind for every site, as `add_domain` takes them."""
        adapters = {}
        for site in self.sites.values():
            config = fresh_config(adapter, site.d_in, site.d_out, site.norm_behind is None, rank)
            adapters[site.name] = build(config, site.spatial, site.d_in, site.d_out, site.name)
        return adapters

    def copy_domain(self, name: str, new: str) -> Domain:
        """A copy of a domain under another name; a shared basis stays shared."""
        original = self.domain(name)
        self._check_new(new)
        domain = copy.deepcopy(original)
        domain.name = new
        self.domains[new] = domain
        return domain

    def remove_domain(self, name: str) -> None:
        """Forget a domain; the others and the backbone are untouched."""
        self.domain(name)
        del self.domains[name]

    def domain(self, name: str) -> Domain:
        """The domain of that name; an unknown one is an error, never the bare backbone."""
        try:
            found: Domain = self.domains[name]
        except (KeyError, TypeError):
            raise CovNormError(f"unknown domain {name!r}: {choices(name, self.domains)}") from None
        return found

    def prepare_(self, name: str, only: bool = False) -> None:
        """Compute what a domain's eval mode is once, for the many mixed batches of a server.

        The answers stay; what is changed in the domain afterwards is not seen, until it trains.
        only: let go of all that answers do not need; then it takes about half the memory, and
        cannot be trained, saved or merged.
        """
        like, domain = next(self.backbone.parameters()), self.domain(name).eval()
        domain.prepared = prepare(domain, self.sites, like)
        if only:
            let_go_(domain)

    def without_domains(self, bases: ModuleMap | None = None) -> MultiDomainNetwork:
        """Return a network on the same backbone (not a copy) with no domains and these bases.

        A domain can be loaded there, while this network runs, and moved over when it is complete.
        """
        other = copy.copy(self)
        other._modules = dict(self._modules)  # a shallow copy shares it
        other.bases, other.domains = ModuleMap(dict((bases or ModuleMap()).items())), ModuleMap()
        return other

    def parameters_of(self, name: str) -> Iterator[nn.Parameter]:
        """What trains in a domain: its adapters' trainable parameters, norms, head, own module."""
        return (p for p in self.domain(name).parameters() if p.requires_grad)

    def num_parameters(self, name: str) -> dict[str, int]:
        """``{"adapter", "norm", "head", "total"}`` of a domain; see `Domain.num_parameters`."""
        return self.domain(name).num_parameters()

    def padded_share(self, names: Sequence[str]) -> dict[str, float]:
        """{site: share of the products that zero-padding wastes} if these were one mixed batch."""
        domains = [self.domain(n) for n in names]
        return {site: padded_share([d.adapters[site] for d in domains]) for site in self.sites}

    # ── running ──────────────────────────────────────────────────────────────────────────────

    def forward(self, *args: Any, domain: str | Sequence[str] | None = None, **kwargs: Any) -> Any:
        """The backbone's forward with a domain's parts in place; other arguments pass through.

        For a list of domains, one a sample of the first argument: a tensor where the heads have
        as many classes, else a list of one answer a sample.
        """
        names, domains, places = self._domains_of(domain, args)
        if places is not None:
            passes, owned = groups(domains, places), any(d.runs_own for d in domains)
            if len(passes) > 1:
                return run_apart(self.forward, names, passes, args, kwargs, owned)
        call = Call(self._roles, domains, places, self._neutral_norms)
        try:
            with call.under_way():
                out = call.backbone(self.backbone)(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            self._explain(error, args)
            raise
        return finish(out, call)

    def train_domain(self, name: str) -> None:
        """Training mode for the backbone and one domain; the other domains stay in theirs."""
        self.domain(name).train()
        self.backbone.train()
        self._settle()

    def train(self, mode: bool = True) -> MultiDomainNetwork:
        """Training mode for the domains and the backbone, except the backbone's own norms: their
        running statistics belong to nobody and stay as they are."""
        super().train(mode)
        self._settle()
        return self

    def _settle(self) -> None:
        """The backbone's own norms in eval mode, and every routed layer still in its place."""
        for layer, (kind, what) in self._roles.items():
            name = what.name if kind == "site" else what
            if self.backbone.get_submodule(name) is not layer:
                raise CovNormError(
                    f"layer {name!r} of the backbone was replaced, so no domain reaches it: change "
                    "the backbone (convert_sync_batchnorm …) before wrapping it"
                )
        for layer in self.backbone.modules():
            if isinstance(layer, _NormBase) and layer.running_mean is not None:
                layer.training = False

    def _apply(self, fn: Any, recurse: bool = True) -> MultiDomainNetwork:
        for norm in self._neutral_norms.values():  # no part of the state, but of the device
            norm._apply(fn)
        super()._apply(fn, recurse)
        return self

    def merge(self, name: str) -> nn.Module:
        """A plain module of the backbone's own class, the domain folded into its layers; with an
        `own` module behind it, their nn.Sequential."""
        return merge(self, self.domain(name))

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def save_domain(
        self, name: str, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32
    ) -> Path:
        """Write a domain into a folder: safetensors and JSON; dtype float32, float16 or int8."""
        return files.save(self, self.domain(name), Path(path), dtype)

    def load_domain(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        own: nn.Module | None = None,
    ) -> Domain:
        """Add a domain from a folder that `save_domain` wrote, under its name or another.

        `own`: a module of the same structure as the one it was saved with. All is checked before
        the network changes.
        """
        domain = files.load(self, Path(path), name, own)
        self._check_new(domain.name)
        self.domains[domain.name] = domain
        return domain

    def basis(self, name: str) -> Basis:
        """What domains of joint mode share, by its name."""
        if name not in self.bases:
            raise CovNormError(f"unknown basis {name!r}: {choices(name, self.bases)}")
        found: Basis = self.bases[name]
        return found

    def save_basis(self, name: str, path: str | os.PathLike[str]) -> Path:
        """Write a basis of joint mode into a folder; its domains are saved apart."""
        return basis_files.save(self, self.basis(name), Path(path))

    def load_basis(self, path: str | os.PathLike[str]) -> Basis:
        """Add a basis that `save_basis` wrote; do so before its domains are loaded."""
        basis = basis_files.load(self, Path(path))
        if check_name(basis.name) in self.bases:
            raise CovNormError(f"basis {basis.name!r} exists already: remove it first")
        self.bases[basis.name] = basis
        return basis

    def remove_basis(self, name: str) -> None:
        """Forget a basis that no domain uses any more."""
        users = [n for n, d in self.domains.items() if d.basis == self.basis(name).name]
        if users:
            raise CovNormError(f"basis {name!r} is used by {', '.join(users)}: remove them first")
        del self.bases[name]

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _layer(self, name: str) -> Layer:
        return cast(Layer, self.backbone.get_submodule(name))

    def _check_new(self, name: str) -> None:
        if check_name(name) in self.domains:
            raise CovNormError(f"domain {name!r} exists already: remove it first, or rename")

    def make_domain(
        self,
        name: str,
        adapters: dict[str, Adapter],
        classes: Sequence[str] | int | None,
        own: nn.Module | None,
        preprocessing: Any,
        weights: Mapping[str, WeightAdapter] | None = None,
    ) -> Domain:
        """A domain beside the network, not yet in it: a failure leaves the network alone."""
        names = class_names(classes)
        head = None
        if self.head_name is not None and names is not None:
            head = fresh_head(self._layer(self.head_name), len(names))
        elif self.head_name is not None and own is None:
            raise CovNormError(
                f"domain {name!r}: give classes= (names or a number), an own= module, or build "
                "the network with head=None"
            )
        elif self.head_name is None and own is None and isinstance(classes, int):
            raise CovNormError(
                f"domain {name!r}: {classes} classes, but this network has no head: name the layer "
                "with MultiDomainNetwork(…, head=name), or give own="
            )
        norms = {
            n: plain_copy(layer).requires_grad_(True)
            for layer, (kind, n) in self._roles.items()
            if kind == "norm"
        }
        anchor = self._layer(next(iter(self.sites))).weight
        domain = Domain(name, adapters, norms, head, names, own, preprocessing, weights)
        for part in (domain.adapters, domain.head, domain.own):  # norms have their backbone's dtype
            if part is not None:
                part.to(anchor.device, anchor.dtype)
        return domain.train(self.training)

    def _domains_of(
        self, domain: str | Sequence[str] | None, args: tuple[Any, ...]
    ) -> tuple[list[str], list[Domain], list[int] | None]:
        """A name a sample, the domains, each once, and which of them each sample belongs to; None:
        the whole batch is of one."""
        if not isinstance(domain, str | Iterable):
            raise CovNormError(f"domain={domain!r}: net(x, domain=…), {choices('', self.domains)}")
        if isinstance(domain, str):
            return [], [self.domain(domain)], None
        names = list(domain)
        if not all(isinstance(n, str) for n in names):
            raise CovNormError(f"domain={domain!r}: give the name of a domain for each sample")
        size = len(args[0]) if args and isinstance(args[0], Tensor) and args[0].ndim else None
        if size is None or size != len(names) or not names:
            raise CovNormError(f"{len(names)} domains for a batch of {size}: give one a sample")
        unique = list(dict.fromkeys(names))
        domains = [self.domain(n) for n in unique]
        if len(unique) == 1:
            return names, domains, None
        if self.training or any(d.training for d in domains):
            raise CovNormError(
                f"a mixed batch of {len(unique)} domains in training mode: batch statistics would "
                "mix them; call net.eval(), or train one domain at a time"
            )
        place = {n: i for i, n in enumerate(unique)}
        return names, domains, [place[n] for n in names]

    def _explain(self, error: Exception, args: tuple[Any, ...]) -> None:
        """Where the first layer cannot take the batch, say that instead of torch's words."""
        stem = next(m for m in self.backbone.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        x = args[0] if args else None
        if isinstance(error, CovNormError) or not isinstance(x, Tensor):
            return
        if isinstance(stem, nn.Conv2d):
            fits = x.ndim == 4 and x.shape[1] == stem.in_channels
            wanted = f"(n, {stem.in_channels}, h, w)"
        else:
            fits, wanted = (
                x.ndim >= 2 and x.shape[-1] == stem.in_features,
                f"(n, {stem.in_features})",
            )
        if not fits:
            raise CovNormError(
                f"the batch is {tuple(x.shape)}, the backbone takes {wanted}"
            ) from error


def _renew_fingerprint(net: nn.Module, _: Any) -> None:
    if isinstance(net, MultiDomainNetwork):
        net.fingerprint = files.fingerprint(net.backbone, net.head_name)


_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _neutral(norm: _BatchNorm) -> nn.Module:
    """A copy of a subclassed norm that changes nothing but does the rest that its class does
    (timm's BatchNormAct2d: the activation)."""
    copied = copy.deepcopy(norm).eval().requires_grad_(False)
    if copied.running_mean is not None and copied.running_var is not None:
        copied.running_mean.zero_()
        copied.running_var.fill_(1)
        copied.eps = 0.0
    if copied.affine:
        copied.weight.fill_(1)
        copied.bias.zero_()
    return copied
