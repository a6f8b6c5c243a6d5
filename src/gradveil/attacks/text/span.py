"""Is a vector one of those that a gradient was made of? Its distance to the span of the gradient, against the noise.

The gradient of a linear layer's weight, as a matrix (d, outputs), is X' D with a row of X (n, d) for each place: with
fewer places than features all inputs lie in a proper subspace, and other vectors do not. With noise of known std the
matrix is a spiked covariance problem: eigenvalues below the Marchenko-Pastur edge are noise, those above it are
corrected for it, and so are their vectors, which noise has turned. ``distance`` is x' (S + I)^-1 x of a unit vector, S
the estimated signal in units of the noise: 1 outside the span, next to 0 inside, and 1 for everyone where noise hides
it all. Without noise the rounding of float32 takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = 3e-7  # of a gradient's entries, relative to the largest singular value over the root of its size


@dataclass(frozen=True)
class Span:
    """``inside`` (d, r): directions of the signal; ``share`` (r,): how much of each is explained by it, in [0, 1]."""

    inside: Tensor
    share: Tensor
    features: int

    @property
    def rank(self) -> int:
        return int(self.share.numel())

    @property
    def full(self) -> bool:
        """Whether everything lies in it, so that it tells nothing."""
        return self.rank >= self.features

    def distance(self, x: Tensor) -> Tensor:
        """(...) of vectors (..., d), in [0, 1]."""
        x = x.to(self.inside)
        square = x.square().sum(-1).clamp(min=1e-30)
        explained = ((x @ self.inside).square() @ self.share) / square
        return (1.0 - explained).clamp(min=0.0)


def span_of(matrices: Sequence[Tensor], stds: Sequence[float] | None, places: int) -> Span:
    """The span of gradients (d, outputs) of layers that are fed with the same; ``stds`` of the noise on each, or None.

    ``places``: at most so many inputs are behind them.
    """
    features = len(matrices[0])
    units = [1.0] * len(matrices) if stds is None else stds
    whole = torch.cat([m.double() / unit for m, unit in zip(matrices, units, strict=True)], 1)
    outputs = whole.shape[1]
    values, vectors = torch.linalg.eigh(whole @ whole.T / outputs)
    values, vectors = values.flip(0).clamp(min=0.0), vectors.flip(1)
    if stds is None:
        # What is left when as many directions as there are places have been taken: rounding, or noise nobody told of.
        rest = values[min(places, features) :]
        floor = float(values[0]) * _ROUNDING**2 * max(1.0, features / outputs)
        values = values / max(floor, float(rest.mean()) if len(rest) else 0.0, 1e-300)
    signal, share = _spikes(values[:places], features / outputs)
    return Span(vectors[:, : len(signal)], share, features)


def _spikes(values: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues of signal plus unit noise, corrected: (sizes of the signal, share of each vector it explains)."""
    edge = (1.0 + math.sqrt(ratio)) ** 2
    kept = values[values > edge]
    b = kept + 1.0 - ratio
    size = (b + (b.square() - 4.0 * kept).clamp(min=0.0).sqrt()) / 2.0 - 1.0
    turned = ((1.0 - ratio / size.square()) / (1.0 + ratio / size)).clamp(0.0, 1.0)  # cos^2 to the true direction
    return size, turned * (1.0 - 1.0 / (1.0 + size))
