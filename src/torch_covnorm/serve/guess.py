"""`domain: auto`: whose image is it? By the statistics that every domain keeps of A's input.

An image goes through the first layers as each domain has them, and the mean m of its features at a
site is compared with the domain's: ``(m - mu)^T Sigma^{-1} (m - mu) / d``, summed over a few sites.
The nearest domain is the answer, and fits if the image is about as near as the domain's own.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.decode import load_image
from ..data.loader import as_input
from ..ecology import Ecology
from ..ecology.prediction import check_preprocessing
from ..errors import CovNormError
from ..network.domain import Domain
from ..network.network import MultiDomainNetwork
from ..network.routing import stepwise

SITES = 4  # the first ones: cheap, and they tell domains apart best
FLOOR = 1e-3  # of the largest eigenvalue
FITS = 4.0  # times the median distance of the domain's own examples


class _Enough(Exception):
    """All sites were seen; the rest of the network need not run."""


@dataclass
class _Known:
    """A domain's statistics at the first sites: means, and matrices that whiten; or none.

    key: its name in the guesser's network, where each version has its own.
    """

    version: str
    key: str
    sites: dict[str, tuple[Tensor, Tensor]]
    typical: float = math.inf


class Guesser:
    """Knows every domain by its first layers alone, so that thousands fit into little memory."""

    def __init__(self, ecology: Ecology) -> None:
        self.ecology = ecology
        self._net: MultiDomainNetwork | None = None
        self._known: dict[str, _Known] = {}
        self._learning = threading.Lock()
        self._numbers = itertools.count()

    @property
    def net(self) -> MultiDomainNetwork:
        """A network of its own, as it keeps only the beginning of each domain."""
        if self._net is None:
            self._net = self.ecology.network().eval()
        return self._net

    def learn(self, wanted: Mapping[str, str]) -> None:
        """Know these domains, {name: version}, and no others; beside whatever is guessed."""
        with self._learning:
            for name in set(self._known) - set(wanted):
                self._forget(name)
            for name, version in wanted.items():
                if name in self._known and self._known[name].version == version:
                    continue
                self._forget(name)
                known = _Known(version, f"{name}~{next(self._numbers)}", {})
                with contextlib.suppress(Exception):  # damaged: not guessed, but the others are
                    self._read(name, known)
                self._known[name] = known

    def guess(
        self, sizes: Mapping[str, Any], images: Mapping[Any, np.ndarray]
    ) -> list[dict[str, Any]]:
        """[{"domain", "distance", "chance", "fits"}], nearest first, of the domains it knows.

        sizes: {domain: key of its image}. images: uint8 (3, size, size) by key.
        """
        found: list[dict[str, Any]] = []
        for name, known in list(self._known.items()):
            if not known.sites or name not in sizes:
                continue
            x = torch.from_numpy(images[sizes[name]])[None]
            try:
                distance = float(self._distances(known, x)[0])
            except CovNormError:  # forgotten just now
                continue
            if math.isfinite(distance):
                found.append({"domain": name, "distance": distance, "typical": known.typical})
        found.sort(key=lambda f: f["distance"])
        scale = max(found[0]["typical"], FLOOR) if found else 1.0
        weights = [math.exp(-(f["distance"] - found[0]["distance"]) / scale) for f in found]
        for f, weight in zip(found, weights, strict=True):
            f["fits"] = f["distance"] <= FITS * f.pop("typical")
            f["chance"] = weight / sum(weights)
        return found

    def _read(self, name: str, known: _Known) -> None:
        """Its statistics, and how far its own examples are from them."""
        moments = self.ecology.moments(name)
        how = check_preprocessing(self.ecology.record(name)["preprocessing"], name)
        sites = [site for site in self.net.sites if site in moments][:SITES]
        if not sites:
            return
        domain = self.ecology.load(self.net.without_domains(), name).eval()
        for site in [s for s in domain.adapters if s not in sites]:
            del domain.adapters[site]
        self.net.domains[known.key] = domain
        statistics = {}
        for site in sites:
            E, P = moments[site].pca()
            white = P / E.clamp(min=FLOOR * float(E[0])).sqrt() / len(E) ** 0.5
            statistics[site] = (moments[site].mean.float(), white.float())
        own = [load_image(b, how["size"], how["fit"]) for b in self.ecology.examples(name).values()]
        ready = _Known(known.version, known.key, statistics)
        images = torch.stack(own or [torch.zeros(3, how["size"], how["size"], dtype=torch.uint8)])
        distances = self._distances(ready, images)
        if own:
            known.typical = float(distances.median())
        self._cut_(domain, ready, images[:1])
        known.sites = statistics  # last: from now on it is guessed

    def _cut_(self, domain: Domain, known: _Known, images: Tensor) -> None:
        """Keep of a domain what the images meet on their way to the last of the sites."""
        met: set[str] = set()
        hooks = [
            norm.register_forward_pre_hook(lambda *_, n=n: met.add(n))
            for n, norm in domain.norms.items()
        ]
        self._distances(known, images)
        for hook in hooks:
            hook.remove()
        for norm in [n for n in domain.norms if n not in met]:
            del domain.norms[norm]
        domain.head = None

    def _forget(self, name: str) -> None:
        known = self._known.pop(name, None)
        if known is not None and self._net is not None and known.key in self._net.domains:
            self._net.remove_domain(known.key)

    @torch.no_grad()
    def _distances(self, known: _Known, images: Tensor) -> Tensor:
        """(n,) of images (n, 3, s, s), through the first layers of the domain."""
        domain = self.net.domain(known.key)
        x = as_input(images, check_preprocessing(domain.preprocessing, known.key))
        total, last = torch.zeros(len(x)), next(reversed(known.sites))
        hooks = []

        def watch(site: str) -> Any:
            mean, white = known.sites[site]

            def hook(_: torch.nn.Module, args: tuple[Tensor]) -> None:
                features = args[0].flatten(2).mean(2) if args[0].ndim == 4 else args[0]
                features = features.reshape(len(x), -1, features.shape[-1]).mean(1)
                total.add_(((features - mean) @ white).square().sum(1))
                if site == last:
                    raise _Enough

            return hook

        for site in known.sites:
            hooks.append(domain.maps[site].register_forward_pre_hook(watch(site)))
        try:
            with contextlib.suppress(_Enough), stepwise():
                self.net(x, domain=known.key)
        finally:
            for hook in hooks:
                hook.remove()
        return total
