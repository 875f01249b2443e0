"""Streaming second-order statistics of a feature vector: n, mean and scatter, and its PCA.

The paper's PCA of x is the triplet (P, E, mu) with ``Sigma = P E P^T`` (eq. 1). These moments are
all that CovNorm needs from the data. Moments of parts of the data merge exactly into those of the
whole (eq. 10), so collection can be split over batches, processes and domains.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CovNormError
from .solver import eigh

# Rows are multiplied in blocks: small enough that the products can be summed in float32, large
# enough that the matrix product dominates. Centering copies a block, so such blocks are smaller.
BLOCK_ROWS = 1 << 18
BLOCK_NUMBERS = 1 << 24
CENTERED_NUMBERS = 1 << 22
# Smaller blocks are multiplied in float64. That is cheap, and few rows leave directions without
# variance, where the rounding of float32 would show.
SMALL_BLOCK = 1 << 15
CENTER_ROWS = 256
GOLDEN = 0.6180339887498949


class Moments:
    """n, mean and scatter ``S = sum (x - mean)(x - mean)^T`` of d-dimensional features.

    The state is float64 whatever the features are, and has a constant size of d + d^2 + 2 numbers.
    Products of large blocks are computed in the dtype of the features (float32 for float16 and
    bfloat16) around each block's mean. So float64 features give float64-exact moments, and a mean
    far larger than the spread does no harm in float32.
    """

    def __init__(self, d: int, device: torch.device | str | None = None) -> None:
        if d < 1:
            raise CovNormError(f"Moments(d={d}): d must be at least 1")
        device = torch.device(device or "cpu")
        if device.type == "mps":  # MPS has no float64
            device = torch.device("cpu")
        self.d = d
        self.n = 0
        self.images = 0  # samples that the rows are positions of; joint mode may weight by them
        with torch.inference_mode(False):
            self.mean = torch.zeros(d, dtype=torch.float64, device=device)
            self.scatter = torch.zeros(d, d, dtype=torch.float64, device=device)

    def __repr__(self) -> str:
        return f"Moments(d={self.d}, n={self.n})"

    @property
    def covariance(self) -> Tensor:
        """``Sigma = S / n`` (d, d): the population covariance that eq. 10 needs."""
        return _symmetric(self.scatter) / max(self.n, 1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, x: Tensor, images: int | None = None) -> Moments:
        """Add features of shape (n, d), or (n, d, h, w) with one row per position; return self.

        `images` is the number of samples the rows come from, if it is not n. NaN or Inf raises an
        error and leaves the moments unchanged.
        """
        rows = self._rows(x.detach())
        batch = Moments(self.d, self.mean.device)
        with torch.autocast(rows.device.type, enabled=False):
            if rows.numel() <= SMALL_BLOCK or self.d < 8 or not _keeps_digits(rows.device):
                rows = rows.double()
            c = _center(rows)
            numbers = BLOCK_NUMBERS if c is None else CENTERED_NUMBERS
            size = max(1, min(BLOCK_ROWS, numbers // self.d))
            for block in rows.split(size) if len(rows) else ():
                batch._merge_(*_block(block, c))
        if not (batch.mean.isfinite().all() and batch.scatter.isfinite().all()):
            raise CovNormError(
                "features contain NaN or Inf, or are too large to square. Check the images and the "
                "learning rate."
            )
        self._merge_(batch.n, batch.mean, batch.scatter)
        if batch.n:
            self.images += len(x) if images is None else images
        return self

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows together; neither argument changes."""
        if other.d != self.d:
            raise CovNormError(f"cannot merge moments of {self.d} and of {other.d} features")
        merged = Moments(self.d, self.mean.device)
        merged._merge_(self.n, self.mean, self.scatter)
        merged._merge_(other.n, other.mean, other.scatter)
        merged.images = self.images + other.images
        return merged

    def weighted(self, n: int) -> Moments:
        """Return the same mean and covariance with n rows: another weight N_i in eq. 10."""
        if n < 0 or (n > 0 and self.n == 0):
            raise CovNormError(f"cannot reweight {self!r} to {n} rows")
        out = Moments(self.d, self.mean.device)
        out._merge_(n, self.mean, self.scatter * (n / max(self.n, 1)))
        out.images = self.images
        return out

    def all_reduce_(self, group: dist.ProcessGroup | None = None) -> Moments:
        """Merge in place over the processes of a group; each may hold any number of rows, or none.

        N and mu are summed first; then the scatters around the common mean add up:
        ``S = sum_i S_i + n_i (mu_i - mu)(mu_i - mu)^T``.
        """
        device = _collective_device(group, self.mean.device)
        total = torch.tensor([self.n, self.images], dtype=torch.int64, device=device)
        weighted = (self.n * self.mean).to(device)
        dist.all_reduce(total, group=group)
        dist.all_reduce(weighted, group=group)
        n, images = total.tolist()
        mean = (weighted / max(n, 1)).to(self.mean)
        delta = self.mean - mean
        scatter = (self.scatter + self.n * torch.outer(delta, delta)).to(device)
        dist.all_reduce(scatter, group=group)
        self.n, self.images, self.mean, self.scatter = n, images, mean, scatter.to(self.mean)
        return self

    def transform(self, A: Tensor, b: Tensor | None = None) -> Moments:
        """Return the moments of ``y = A x + b`` (eq. 2) for A (e, d) and b (e,).

        ``mu_y = A mu_x + b`` and ``Sigma_y = A Sigma_x A^T``.
        """
        if A.ndim != 2 or A.shape[1] != self.d:
            raise CovNormError(
                f"A has shape {tuple(A.shape)}, but these moments need (…, {self.d})"
            )
        if b is not None and b.shape != A.shape[:1]:
            raise CovNormError(f"b has shape {tuple(b.shape)}, but A needs ({len(A)},)")
        A = A.detach().to(self.mean)
        out = Moments(A.shape[0], self.mean.device)
        out.n, out.images = self.n, self.images
        out.mean = A @ self.mean + (0 if b is None else b.detach().to(self.mean))
        out.scatter = _symmetric(A @ self.scatter @ A.T)
        return out

    def pca(self) -> tuple[Tensor, Tensor]:
        """Return E (d,), largest first, and P (d, d) of ``Sigma = P E P^T`` (eq. 1); see `eigh`."""
        E, P = eigh(self.covariance)
        return E.to(self.mean), P.to(self.mean)

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``{"n", "images", "mean": (d,), "scatter": (d, d)}`` for safetensors."""
        counts = {"n": torch.tensor(self.n), "images": torch.tensor(self.images)}
        return counts | {"mean": self.mean.clone(), "scatter": self.scatter.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; wrong shapes, NaN or a negative n raise an error."""
        missing = {"n", "mean", "scatter"} - set(state)
        if missing:
            raise CovNormError(f"moments have no {sorted(missing)}")
        mean, scatter = state["mean"].to(self.mean), state["scatter"].to(self.mean)
        n = torch.as_tensor(state["n"])
        images = torch.as_tensor(state.get("images", n))
        if mean.shape != (self.d,) or scatter.shape != (self.d, self.d):
            raise CovNormError(
                f"moments of shapes {tuple(mean.shape)}, {tuple(scatter.shape)}: need d = {self.d}"
            )
        good = all(v.numel() == 1 and bool(v.isfinite()) and int(v) >= 0 for v in (n, images))
        if not (good and mean.isfinite().all() and scatter.isfinite().all()):
            raise CovNormError("moments contain NaN, Inf or a negative n: the file is damaged")
        self.n, self.images = int(n), int(images)
        self.mean, self.scatter = mean.clone(), scatter.clone()

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Moments:
        """Return the moments whose `state_dict` this is."""
        moments = cls(len(state["mean"]))
        moments.load_state_dict(state)
        return moments

    def _rows(self, x: Tensor) -> Tensor:
        """Reshape (n, d) or (n, d, h, w) → (rows, d), in the dtype of the products."""
        if x.ndim not in (2, 4) or x.shape[1] != self.d:
            raise CovNormError(
                f"features have shape {tuple(x.shape)}; need (n, {self.d}) or (n, {self.d}, h, w)"
            )
        if x.is_complex():
            raise CovNormError("features are complex numbers: pass their real and imaginary parts")
        if not x.is_floating_point():
            x = x.double()
        elif x.element_size() < 4:
            x = x.float()
        return x.movedim(1, -1).reshape(-1, self.d)

    def _merge_(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        """Add by Chan's ``S = S_a + S_b + (n_a n_b / n)(mu_b - mu_a)(mu_b - mu_a)^T``."""
        if n == 0:
            return
        total = self.n + n
        delta = mean.to(self.mean) - self.mean
        self.scatter += scatter.to(self.mean)
        self.scatter.addr_(delta, delta, alpha=self.n * n / total)
        self.mean += delta * (n / total)
        self.n = total


def _center(rows: Tensor) -> Tensor | None:
    """Estimate a center for rows (n, d) from a few of them; None if 0 is close enough.

    Any center within a few standard deviations of the mean keeps the precision. Most features have
    been centered by B1 already.
    """
    if len(rows) <= CENTER_ROWS:
        return rows.mean(0) if len(rows) else None
    # The golden ratio spreads the indices, out of step with the rows of an image.
    spread = torch.arange(CENTER_ROWS, dtype=torch.float64) * GOLDEN % 1 * len(rows)
    few = rows[spread.long().to(rows.device)].double()
    c = few.mean(0)
    return None if _near(c, few.var(0, correction=0)) else c.to(rows.dtype)


def _block(rows: Tensor, c: Tensor | None) -> tuple[int, Tensor, Tensor]:
    """Return n, mean and scatter of one block of rows (n, d), with products around c.

    ``S = sum (x-c)(x-c)^T - n (mu-c)(mu-c)^T`` is exact for any c. If c is too far from the mean,
    the block is centered once more.
    """
    n = len(rows)
    for _ in range(2):
        centered = rows if c is None else rows - c
        scatter = (centered.T @ centered).double()
        rest = centered.sum(0).double() / n
        floor = 0.0 if c is None else 1e-6 * c.double()
        mean = rest if c is None else rest + c
        if _near(rest, scatter.diagonal() / n - rest.square(), floor):
            break
        c = mean.to(rows.dtype)
    return n, mean, scatter.addr_(rest, rest, alpha=-n)


def _near(mean: Tensor, variance: Tensor, floor: Tensor | float = 0.0) -> bool:
    """Return whether each mean is within two standard deviations of 0, or its center's rounding."""
    return bool((mean.square() <= 4 * variance + torch.as_tensor(floor).square()).all())


def _symmetric(S: Tensor) -> Tensor:
    return (S + S.T) / 2


def _collective_device(group: dist.ProcessGroup | None, here: torch.device) -> torch.device:
    """Return where the group's backend needs its tensors: NCCL on the GPU, gloo anywhere."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return here


def _keeps_digits(device: torch.device) -> bool:
    """Return whether this device computes float32 products in float32, not TF32 or bfloat16."""
    cuda = device.type == "cuda"
    backend: Any = torch.backends.cuda if cuda else torch.backends.mkldnn
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:  # an older torch
        return not (cuda and backend.matmul.allow_tf32)
    return precision in ("none", "ieee")
