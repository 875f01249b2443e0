"""`domain: auto`, on the worker's side: compare an image with the statistics of every domain.

An image goes through the first layers of each domain. The mean m of its features at a site is
compared with the mean mu and covariance Sigma that the domain's training images had there:
``(m - mu)^T Sigma^{-1} (m - mu) / d``, summed over a few sites. The nearest domain is the guess. It
fits if the image is about as near as the domain's own examples are.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.image_files import load_image
from ..data.loader import as_input
from ..ecology import Ecology
from ..ecology.prediction import check_preprocessing, input_shape
from ..errors import CovNormError
from ..network.network import MultiDomainNetwork
from ..network.routing import stepwise

SITES = 4  # the first ones: they are cheap and separate domains best
FLOOR = 1e-3  # of the largest eigenvalue
FITS = 4.0  # times the median distance of the domain's examples


class _LastSite(Exception):
    """All sites were seen; the rest of the network need not run."""


@dataclass
class _Statistics:
    version: str
    key: str  # name of this version in the guesser's network
    sites: dict[str, tuple[Tensor, Tensor]]  # mean, whitening matrix; {} if it cannot be guessed
    typical: float = math.inf  # median distance of the domain's examples


class Guesser:
    """Guess the domain of images. Only the first layers of each domain are kept in memory."""

    def __init__(self, ecology: Ecology) -> None:
        self.ecology = ecology
        self._known: dict[str, _Statistics] = {}
        self._learning = threading.Lock()
        self._numbers = itertools.count()

    @cached_property
    def net(self) -> MultiDomainNetwork:
        """The guesser's network; not the worker's, because its domains are cut short."""
        return self.ecology.network().eval()

    def learn(self, wanted: Mapping[str, str]) -> None:
        """Know exactly these domains, {name: version}. Guesses may run meanwhile."""
        with self._learning:
            for name in set(self._known) - set(wanted):
                self._forget(name)
            for name, version in wanted.items():
                if name in self._known and self._known[name].version == version:
                    continue
                self._forget(name)
                known = _Statistics(version, f"{name}~{next(self._numbers)}", {})
                with contextlib.suppress(Exception):  # damaged: only this one is never guessed
                    known = self._read(name, known)
                self._known[name] = known

    def guess(
        self, shapes: Mapping[str, Any], images: Mapping[Any, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Return [{"domain", "distance", "chance", "fits"}] of the known domains, nearest first.

        shapes: {domain: key of its image}. images: uint8 (3, size, size) by key.
        """
        found: list[tuple[float, float, str]] = []  # distance, typical distance, name
        for name, known in list(self._known.items()):
            if not known.sites or name not in shapes:
                continue
            x = torch.from_numpy(images[shapes[name]])[None]
            try:
                distance = float(self._distances(known, x)[0])
            except CovNormError:  # forgotten meanwhile
                continue
            if math.isfinite(distance):
                found.append((distance, known.typical, name))
        found.sort()
        weights = [math.exp((found[0][0] - d) / max(found[0][1], FLOOR)) for d, _, _ in found]
        return [
            {"domain": name, "distance": d, "fits": d <= FITS * typical, "chance": w / sum(weights)}
            for (d, typical, name), w in zip(found, weights, strict=True)
        ]

    def _read(self, name: str, known: _Statistics) -> _Statistics:
        moments = self.ecology.moments(name)
        config = check_preprocessing(self.ecology.record(name)["preprocessing"], name)
        shape = input_shape(config)
        sites = [site for site in self.net.sites if site in moments][:SITES]
        if not sites:
            return known
        domain = self.ecology.load(self.net.without_domains(), name).eval()
        for site in [s for s in domain.adapters if s not in sites]:
            del domain.adapters[site]
        self.net.domains[known.key] = domain
        statistics = {}
        for site in sites:
            E, P = moments[site].pca()
            white = P / E.clamp(min=FLOOR * float(E[0])).sqrt() / len(E) ** 0.5
            statistics[site] = (moments[site].mean.float(), white.float())
        examples = [load_image(data, *shape) for data in self.ecology.examples(name).values()]
        images = torch.stack(
            examples or [torch.zeros(3, shape.size, shape.size, dtype=torch.uint8)]
        )
        ready = _Statistics(known.version, known.key, statistics)
        passed: set[str] = set()
        with contextlib.ExitStack() as hooks:
            for key, norm in domain.norms.items():
                hook = norm.register_forward_pre_hook(lambda *_, key=key: passed.add(key))
                hooks.enter_context(hook)
            distances = self._distances(ready, images)
        if examples:
            ready.typical = float(distances.median())
        for key in set(domain.norms) - passed:  # those after the last of the sites
            del domain.norms[key]
        domain.head = None
        return ready

    def _forget(self, name: str) -> None:
        known = self._known.pop(name, None)
        if known is not None and known.key in self.net.domains:
            self.net.remove_domain(known.key)

    @torch.no_grad()
    def _distances(self, known: _Statistics, images: Tensor) -> Tensor:
        """Return the distances (n,) of images (n, 3, s, s) from a domain."""
        domain = self.net.domain(known.key)
        x = as_input(images, check_preprocessing(domain.preprocessing, known.key))
        total, last = torch.zeros(len(x)), next(reversed(known.sites))

        def compare(site: str, _: torch.nn.Module, args: tuple[Tensor]) -> None:
            mean, white = known.sites[site]
            features = args[0].flatten(2).mean(2) if args[0].ndim == 4 else args[0]
            features = features.reshape(len(x), -1, features.shape[-1]).mean(1)
            total.add_(((features - mean) @ white).square().sum(1))
            if site == last:
                raise _LastSite

        with contextlib.ExitStack() as hooks, contextlib.suppress(_LastSite), stepwise():
            for site in known.sites:
                hook = domain.maps[site].register_forward_pre_hook(partial(compare, site))
                hooks.enter_context(hook)
            self.net(x, domain=known.key)
        return total
