"""`MultiDomainNetwork`: one frozen backbone, many domains."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..adapters import (
    Adapter,
    Layer,
    Site,
    fresh_adapter,
    padded_share,
    shallow_copy,
    weight_adapters,
)
from ..errors import CovNormError, choices
from . import basis as basis_files
from . import files
from .basis import Basis
from .domain import Domain, check_name
from .fresh import make_domain
from .merge import merge
from .mixed import finish, groups, run_passes
from .modulemap import ModuleMap
from .routing import Call, Role, RoutedHead, RoutedNorm, route_
from .sites import SitePredicate, find_head, find_norms, find_sites
from .states import check_state
from .unpicklable import Unpicklable

if TYPE_CHECKING:
    from .compiled import CompiledBackbone


class MultiDomainNetwork(nn.Module):
    """A frozen backbone F with adapters A at its sites for each domain (fig. 1 of the paper).

    Args:
        backbone: any nn.Module. It is frozen and not copied. Its weights never change.
        sites: picks Conv2d and Linear layers by (name, module); by default see `sites.default`.
        head: the layer that each domain replaces: a name, "auto" for the last Linear, or None for
            a feature extractor.

    ``net(x, domain="a")`` runs one domain, ``net(x, domain=["a", "b", …])`` one domain per sample.
    `domains` and `bases` are mutable mappings by name.
    """

    def __init__(
        self,
        backbone: nn.Module,
        sites: SitePredicate | None = None,
        head: str | None = "auto",
    ) -> None:
        self._unpicklable = Unpicklable()  # first, so that it refuses before anything else fails
        super().__init__()
        self.head_name = find_head(backbone, head)
        self.sites: dict[str, Site] = find_sites(backbone, sites, self.head_name)
        norms = find_norms(backbone)
        self._neutral_norms: dict[str, nn.Module] = {
            n: _neutral(m) for n, m in norms.items() if type(m) not in _PLAIN_NORMS
        }
        self._roles: dict[nn.Module, Role] = {m: RoutedNorm(n) for n, m in norms.items()}
        for name, site in self.sites.items():
            self._roles[backbone.get_submodule(name)] = site
        if self.head_name is not None:
            self._roles[backbone.get_submodule(self.head_name)] = RoutedHead(self.head_name)
        route_(self._roles)
        self.backbone = backbone.requires_grad_(False)
        self.bases = ModuleMap()  # before the domains, which refer to them
        self.domains = ModuleMap()
        self.fingerprint = files.fingerprint(backbone, self.head_name)
        self._compiled: CompiledBackbone | None = None
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
        norms: str | None = None,
    ) -> Domain:
        """Add a domain with new adapters and a new head.

        Args:
            classes: class names, or their number. Required if the backbone has a head and there is
                no `own` module.
            adapter: "residual", "parallel", "conv", "batchnorm", or "lowrank" (residual with rank
                0.25); "own" (a copy of the backbone's weights) or "mask" (1 bit per weight), which
                replace weights and add no layer; "none" (only norms and head).
            rank: make A a low-rank C·W: a number of directions, or a share of d in (0, 1).
            own: a further module of the domain, called on the backbone's output. A container such
                as nn.ModuleDict is not called, but trained and saved with the domain.
            preprocessing: any JSON value; saved with the domain. Default: the attribute of that
                name of the backbone, if it is a dictionary.
            norms: which BatchNorms of the backbone the domain copies and trains. "shared": none,
                they stay the backbone's in eval mode (the default). "sites": those that follow a
                site. "own": all (the default of the adapters "batchnorm", "own" and "mask").
        """
        self._check_new(name)
        adapters = self.fresh_adapters(adapter, rank)
        if norms is None:
            norms = "own" if adapter in ("batchnorm", "own", "mask") else "shared"
        if adapter == "batchnorm" and norms == "shared" and all(a.idle for a in adapters.values()):
            raise CovNormError(
                "adapter='batchnorm' trains the norms of the backbone, and norms='shared' copies "
                "none of them: choose norms='own' or 'sites'"
            )
        if preprocessing is None:
            given = getattr(self.backbone, "preprocessing", None)
            preprocessing = copy.deepcopy(given) if isinstance(given, dict) else None
        weights = weight_adapters(self.backbone, adapter, self.head_name)
        self.domains[name] = make_domain(
            self, name, adapters, classes, own, preprocessing, weights, norms
        )
        return self.domain(name)

    def fresh_adapters(self, adapter: str, rank: int | float | None = None) -> dict[str, Adapter]:
        """Return untrained adapters for every site; arguments as for `add_domain`."""
        return {n: fresh_adapter(adapter, site, rank) for n, site in self.sites.items()}

    def copy_domain(self, name: str, new: str) -> Domain:
        """Copy a domain under another name. A shared basis stays shared."""
        domain = self.domain(name)
        self._check_new(new)
        self.domains[new] = copied = copy.deepcopy(domain)
        copied.name = new
        return copied

    def remove_domain(self, name: str) -> None:
        """Remove a domain. The backbone and the other domains do not change."""
        self.domain(name)
        del self.domains[name]

    def domain(self, name: str) -> Domain:
        """Return the domain of that name."""
        try:
            return cast(Domain, self.domains[name])
        except (KeyError, TypeError):
            raise CovNormError(f"unknown domain {name!r}: {choices(name, self.domains)}") from None

    def without_domains(self, bases: Mapping[str, Basis] | None = None) -> MultiDomainNetwork:
        """Return a network on the same backbone, not a copy of it, with no domains and these bases.

        Domains can be loaded there while this network is in use, and assigned to its `domains`
        when they are complete.
        """
        children = {"domains": ModuleMap(), "bases": ModuleMap(bases)}
        return cast(MultiDomainNetwork, shallow_copy(self, children=children))

    @contextlib.contextmanager
    def restoring_on_error(self, names: Sequence[str]) -> Iterator[None]:
        """Restore the domains and bases as they were before, on any exception inside.

        names: the domains that may change inside. Of all others, only domains on a basis may
        change, and only by getting other maps A.
        """
        bases = dict(self.bases.items())
        domains = {n: copy.deepcopy(d) if n in names else d for n, d in self.domains.items()}
        members = [d for n, d in domains.items() if d.basis and n not in names]
        maps = [(a, a.A) for d in members for a in d.adapters.values()]
        try:
            yield
        except BaseException:
            self.bases, self.domains = ModuleMap(bases), ModuleMap(domains)
            for adapter, A in maps:
                adapter.A = A
            raise

    def prepare_(self, name: str, only: bool = False) -> None:
        """Compute once what a domain does in eval mode, for the many mixed batches of a server.

        The outputs stay the same. Later changes to the domain have no effect until it trains.
        only: drop everything that inference does not need. The domain then takes about half the
        memory and cannot be trained, saved or merged.
        """
        self.domain(name).prepare_(self.sites, next(self.backbone.parameters()), only)

    def parameters_of(self, name: str) -> Iterator[nn.Parameter]:
        """Return the trainable parameters of a domain: adapters, norms, head and own module."""
        return (p for p in self.domain(name).parameters() if p.requires_grad)

    def num_parameters(self, name: str) -> dict[str, int]:
        """Return ``{"adapter", "norm", "head", "total"}``; see `Domain.num_parameters`."""
        return self.domain(name).num_parameters()

    def padded_share(self, names: Sequence[str]) -> dict[str, float]:
        """Return {site: share of the products that zero padding wastes} for such a mixed batch."""
        domains = [self.domain(n) for n in names]
        return {site: padded_share([d.adapters[site] for d in domains]) for site in self.sites}

    def merge(self, name: str) -> nn.Module:
        """Return a plain module of the backbone's class, with the domain folded into its layers.

        If an `own` module runs after it, the result is the nn.Sequential of both.
        """
        return merge(self, self.domain(name))

    # ── running ──────────────────────────────────────────────────────────────────────────────

    def forward(self, *args: Any, domain: str | Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Run the backbone with the parts of a domain. Other arguments pass through.

        With a list of domains, one per sample of the first argument, the output is a tensor if all
        heads have equally many classes, else a list with one output per sample.
        """
        if torch.compiler.is_dynamo_compiling():
            from .compiled import outside_graph

            compiled = self._compiled is not None
            return outside_graph(self, compiled, *args, domain=domain, **kwargs)
        names, domains, places = self._domains_of(domain, args)
        if places is not None and len(passes := groups(domains, places)) > 1:
            as_list = any(d.runs_own for d in domains)
            return run_passes(self.forward, names, passes, args, kwargs, as_list)
        call = Call(self._roles, domains, places, self._neutral_norms)
        try:
            with call.current():
                if self._compiled is not None:
                    out = self._compiled(call, self.backbone, args, kwargs)
                else:
                    out = call.backbone(self.backbone)(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            self._explain(error, args)
            raise
        return finish(out, call)

    def compile_(self, *, disable: bool = False, **options: Any) -> MultiDomainNetwork:
        """Compile the backbone with `torch.compile`, once for all domains; returns the network.

        options: those of torch.compile, such as backend= or mode=. disable: go back to uncompiled.

        The first call compiles. Another domain runs the same graph if its adapters are of the same
        kinds; a second number of classes, rank or batch size compiles once more, and then any does.
        Mixed batches, domains that replace weights, and `prepare_(…, only=True)` run uncompiled.
        """
        from .compiled import CompiledBackbone

        self._compiled = None if disable else CompiledBackbone(options)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, as `nn.Module.compile` does: `compile_` with the same options."""
        self.compile_(*args, **kwargs)

    def _domains_of(
        self, domain: str | Sequence[str] | None, args: tuple[Any, ...]
    ) -> tuple[list[str], list[Domain], list[int] | None]:
        """Return one name per sample, the domains, each once, and each sample's position in them.

        The positions are None if the whole batch belongs to one domain.
        """
        if not isinstance(domain, str | Iterable):
            raise CovNormError(
                f"domain={domain!r}: call net(x, domain=name): {choices('', self.domains)}"
            )
        if isinstance(domain, str):
            return [], [self.domain(domain)], None
        names = list(domain)
        if not all(isinstance(n, str) for n in names):
            raise CovNormError(f"domain={domain!r}: give the name of a domain for each sample")
        size = len(args[0]) if args and isinstance(args[0], Tensor) and args[0].ndim else None
        if size is None or size != len(names) or not names:
            raise CovNormError(f"{len(names)} domains for a batch of {size}: give one per sample")
        unique = list(dict.fromkeys(names))
        domains = [self.domain(n) for n in unique]
        if len(unique) == 1:
            return names, domains, None
        if self.training or any(d.training for d in domains):
            raise CovNormError(
                f"a mixed batch of {len(unique)} domains in training mode: batch statistics would "
                "mix them. Call net.eval(), or train one domain at a time."
            )
        place = {n: i for i, n in enumerate(unique)}
        return names, domains, [place[n] for n in names]

    def _explain(self, error: Exception, args: tuple[Any, ...]) -> None:
        """Replace torch's error if the first layer cannot take the batch."""
        stem = next(m for m in self.backbone.modules() if isinstance(m, Layer))
        x = args[0] if args else None
        if isinstance(error, CovNormError) or not isinstance(x, Tensor):
            return
        if isinstance(stem, nn.Conv2d):
            fits = x.ndim == 4 and x.shape[1] == stem.in_channels
            wanted = f"(n, {stem.in_channels}, h, w)"
        else:
            fits = x.ndim >= 2 and x.shape[-1] == stem.in_features
            wanted = f"(n, {stem.in_features})"
        if not fits:
            raise CovNormError(
                f"the batch has shape {tuple(x.shape)}, but the backbone takes {wanted}"
            ) from error

    def train_domain(self, name: str) -> None:
        """Set training mode for the backbone and one domain. Other domains stay in theirs."""
        self.domain(name).train()
        self.backbone.train()
        self._check_layers_and_fix_norms()

    def train(self, mode: bool = True) -> MultiDomainNetwork:
        """Set training mode for the domains and the backbone, except the backbone's norms."""
        super().train(mode)
        self._check_layers_and_fix_norms()
        return self

    def _check_layers_and_fix_norms(self) -> None:
        """Check that no routed layer was replaced, and keep the backbone's norms in eval mode.

        Their running statistics belong to no domain, so nothing may change them.
        """
        for layer, role in self._roles.items():
            if self.backbone.get_submodule(role.name) is not layer:
                raise CovNormError(
                    f"layer {role.name!r} of the backbone was replaced, so no domain reaches it. "
                    "Change the backbone (convert_sync_batchnorm …) before wrapping it."
                )
        for layer in self.backbone.modules():
            if isinstance(layer, _NormBase) and layer.running_mean is not None:
                layer.training = False

    def _apply(self, fn: Any, recurse: bool = True) -> MultiDomainNetwork:
        for norm in self._neutral_norms.values():  # not part of the state, but move with it
            norm._apply(fn)
        super()._apply(fn, recurse)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of a network that has the same backbone, bases and domains.

        Everything about the domains is checked before the network changes, unless strict=False.
        """
        if strict:
            check_state(self.state_dict(), state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def save_domain(
        self, name: str, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32
    ) -> Path:
        """Write a domain into a folder as safetensors and JSON, in float32, float16 or int8."""
        return files.save(self, self.domain(name), Path(path), dtype)

    def load_domain(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        own: nn.Module | None = None,
    ) -> Domain:
        """Add a domain from a folder that `save_domain` wrote, under its name or another.

        own: a module of the same structure as the one the domain was saved with. Everything is
        checked before the network changes.
        """
        domain = files.load(self, Path(path), name, own)
        self._check_new(domain.name)
        self.domains[domain.name] = domain
        return domain

    def basis(self, name: str) -> Basis:
        """Return the basis of that name, which domains of joint mode share."""
        if name not in self.bases:
            raise CovNormError(f"unknown basis {name!r}: {choices(name, self.bases)}")
        return cast(Basis, self.bases[name])

    def save_basis(self, name: str, path: str | os.PathLike[str]) -> Path:
        """Write a basis of joint mode into a folder. Its domains are saved separately."""
        return basis_files.save(self, self.basis(name), Path(path))

    def load_basis(self, path: str | os.PathLike[str]) -> Basis:
        """Add a basis that `save_basis` wrote. Load it before its domains."""
        basis = basis_files.load(self, Path(path))
        if check_name(basis.name) in self.bases:
            raise CovNormError(f"basis {basis.name!r} already exists: remove it first")
        self.bases[basis.name] = basis
        return basis

    def remove_basis(self, name: str) -> None:
        """Remove a basis that no domain uses."""
        users = [n for n, d in self.domains.items() if d.basis == self.basis(name).name]
        if users:
            raise CovNormError(f"basis {name!r} is used by {', '.join(users)}: remove them first")
        del self.bases[name]

    def _check_new(self, name: str) -> None:
        if check_name(name) in self.domains:
            raise CovNormError(f"domain {name!r} already exists: remove it first, or rename")


def _renew_fingerprint(net: nn.Module, _: Any) -> None:
    if isinstance(net, MultiDomainNetwork):
        net.fingerprint = files.fingerprint(net.backbone, net.head_name)


_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _neutral(norm: _BatchNorm) -> nn.Module:
    """Return a copy of a subclassed norm that does not normalize.

    What remains is the rest of what its class does, such as the activation of timm's
    BatchNormAct2d.
    """
    copied = copy.deepcopy(norm).eval().requires_grad_(False)
    copied.reset_parameters()
    copied.eps = 0.0
    return copied
