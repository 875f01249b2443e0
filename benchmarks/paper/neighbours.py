"""Other ways to cut the A's of a network to one budget, for comparison.

Each takes the trained maps, the moments of A's input x and the gradients at A's output, and returns
{site: (C, W, bias)} with at most `budget` parameters in total. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_covnorm as cn
from torch_covnorm.adapters import LowRankMap
from torch_covnorm.compress.covnorm import ranks_within
from torch_covnorm.compress.geometric import svd
from torch_covnorm.compress.gradients import GradientMoments
from torch_covnorm.stats.moments import Moments
from torch_covnorm.stats.ranks import by_budget, by_variance, rank_of, smallest

Cut = dict[str, tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Trained:
    """A domain with its full A's, and the statistics of its data."""

    net: cn.MultiDomainNetwork
    name: str
    moments: dict[str, Moments]
    gradients: dict[str, GradientMoments]

    @property
    def matrices(self) -> dict[str, Tensor]:
        """{site: A (d_out, d_in)} in float64."""
        maps = self.net.domain(self.name).maps
        return {site: A.matrix().detach().double() for site, A in maps.items()}

    @property
    def costs(self) -> dict[str, int]:
        """Parameters of one direction."""
        return {site: sum(A.shape) for site, A in self.matrices.items()}


def svd_one_ratio(trained: Trained, budget: int) -> Cut:
    """Apply the paper's SVD: r = d·ratio at every site, with the largest ratio that fits."""
    costs, A = trained.costs, trained.matrices

    def ranks(ratio: float) -> dict[str, int]:
        return {s: rank_of(ratio, *A[s].shape) for s in A}

    def fits(ratio: float) -> bool:
        return sum(costs[s] * r for s, r in ranks(ratio).items()) <= budget

    return _cut(trained, ranks(smallest([i / 512 for i in range(256, 0, -1)], fits)))


def svd_greedy(trained: Trained, budget: int) -> Cut:
    """Apply SVD; the budget goes to the largest s²/(d_in + d_out) over all sites."""
    spectra = {s: torch.linalg.svdvals(A).square() for s, A in trained.matrices.items()}
    return _cut(trained, by_budget(spectra, trained.costs, budget))


def svd_loss_ranks(trained: Trained, budget: int) -> Cut:
    """Apply SVD with the ranks that the loss metric gives each site."""
    found = ranks_within(trained.net, trained.name, trained.moments, budget, trained.gradients)
    return _cut(trained, {s: k for s, (_, k) in found.items()})


def svd_scaled(trained: Trained, budget: int) -> Cut:
    """Apply SVD to A·D with D = diag(std of x)^½, then D⁻¹ (after ASVD), with a greedy budget."""
    scales, spectra = {}, {}
    for site, A in trained.matrices.items():
        second = trained.moments[site].covariance.diagonal() + trained.moments[site].mean.square()
        scales[site] = second.clamp(min=1e-12).sqrt().sqrt()
        spectra[site] = torch.linalg.svdvals(A * scales[site]).square()
    return _cut(trained, by_budget(spectra, trained.costs, budget), scales)


def _cut(
    trained: Trained, ranks: Mapping[str, int], scales: Mapping[str, Tensor] | None = None
) -> Cut:
    """Truncate the SVDs. With `scales` the bias makes up for what is lost of the mean."""
    cut: Cut = {}
    for site, A in trained.matrices.items():
        bias = trained.net.domain(trained.name).maps[site].bias.detach().double()
        scale = torch.ones(A.shape[1]).to(A) if scales is None else scales[site]
        C, W = svd(A * scale, ranks[site])
        W = W / scale
        if scales is not None:
            bias = bias + (A - C @ W) @ trained.moments[site].mean
        cut[site] = (C, W, bias)
    return cut


def one_threshold(trained: Trained, budget: int) -> float:
    """Apply the paper's rule: the largest t whose 2·d·min(kx, ky) fit the budget in total."""
    spectra = {}
    for site, A in trained.matrices.items():
        x = trained.moments[site]
        y = x.transform(A, torch.zeros(len(A)).to(A))
        spectra[site] = (x.pca()[0], y.pca()[0])

    def fits(t: float) -> bool:
        ranks = {s: min(by_variance(x, t), by_variance(y, t)) for s, (x, y) in spectra.items()}
        return sum(trained.costs[s] * k for s, k in ranks.items()) <= budget

    return smallest([1 - i / 2000 for i in range(1, 2000)], fits)


CUTS: dict[str, Callable[[Trained, int], Cut]] = {
    "svd": svd_one_ratio,
    "svd-greedy": svd_greedy,
    "svd-loss-ranks": svd_loss_ranks,
    "svd-scaled": svd_scaled,
}


def apply_(net: cn.MultiDomainNetwork, name: str, cut: Cut) -> None:
    """Replace a domain's A's by the factors."""
    adapters = net.domain(name).adapters
    for site, (C, W, bias) in cut.items():
        old = adapters[site].A
        adapters[site].A = LowRankMap.of(old.spatial, C, W, bias.to(old.bias))
