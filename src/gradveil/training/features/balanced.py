"""Balanced scattering: scattering features whose directions are brought closer to the same size.

Noise is as large in every direction of a gradient, and a gradient is as large as the features in its direction: what
lies in directions of small features drowns. Scattering channels are far from balanced: a few directions, shared by
most of the channels, hold most of the energy. Three fixed maps mend some of that:

1. opponent colours: (R + G + B) / sqrt 3, (R - B) / sqrt 2, (R - 2 G + B) / sqrt 6. Colours of most pictures are
   nearly grey, so that three channels say nearly the same three times; their differences are small, and telling.
2. x -> K^(-1/4) x at every place, with K the covariance of the channels. K is that of *drawings* (drawings.py), not of
   the data: a statistic of the data would have to be paid for. The power 1/4 is half-way: whole whitening (1/2) gives
   the same weight to directions that hold nothing.
3. every example is scaled to the same length, so that no gradient is clipped for the contrast of its picture.

:class:`CentredScattering` takes the mean of the drawings off before 3: what all pictures share tells no classes apart,
and takes up length that the rest is scaled down for.

Each is a function of one example alone: they cost no privacy. benchmarks/try_features.py measures what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.training.features.drawings import draw
from gradveil.training.features.scattering import Scattering

_DRAWINGS, _SEED = 512, 20260801
POWER = 0.25
_FLOOR = 1e-3  # of the largest variance, added to all of them: what hardly ever varies is not blown up
_LENGTH = 70.0  # of an example
_OPPONENT = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))


class BalancedScattering(Scattering):
    """As :class:`Scattering`, (N, C, H, W) to (N, 81 C, H / 4, W / 4); three channels are taken to be colours.

    >>> BalancedScattering((1, 8, 8)).output_shape
    (81, 2, 2)
    """

    balance: Tensor

    def __init__(self, input_shape: Sequence[int], *, power: float = POWER) -> None:
        super().__init__(input_shape)
        self.register_buffer("balance", _balance(self.input_shape, power), persistent=False)

    def channels(self, x: Tensor) -> Tensor:
        """The balanced channels, before each example is scaled."""
        found: Tensor = torch.einsum("dc,nchw->ndhw", self.balance, super().forward(opponent(x)))
        return found

    def forward(self, x: Tensor) -> Tensor:
        channels = self.channels(x)
        scale = _LENGTH / torch.linalg.vector_norm(channels, dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)
        balanced: Tensor = channels * scale
        return balanced


class CentredScattering(BalancedScattering):
    """The same, with the mean of the drawings' channels, at each place, taken off before the scaling.

    >>> CentredScattering((1, 8, 8)).output_shape
    (81, 2, 2)
    """

    mean: Tensor

    def __init__(self, input_shape: Sequence[int], *, power: float = POWER) -> None:
        super().__init__(input_shape, power=power)
        with torch.no_grad():
            mean = torch.einsum("dc,chw->dhw", self.balance, _drawn(self.input_shape).mean(0))
        self.register_buffer("mean", mean, persistent=False)

    def channels(self, x: Tensor) -> Tensor:
        return super().channels(x) - self.mean


def opponent(x: Tensor) -> Tensor:
    """Three colour channels as opponent colours; anything else as it is."""
    if x.shape[1] != 3:
        return x
    axes = F.normalize(torch.tensor(_OPPONENT, dtype=x.dtype, device=x.device), dim=1)
    return torch.einsum("dc,nchw->ndhw", axes, x)


@lru_cache(maxsize=2)
def _drawn(shape: tuple[int, ...]) -> Tensor:
    """Scattering features of drawings."""
    scattering = Scattering(shape)
    drawings = opponent(draw(_DRAWINGS, shape, _SEED))
    with torch.no_grad():
        return torch.cat([scattering(part) for part in drawings.split(16)])


@lru_cache(maxsize=8)
def _balance(shape: tuple[int, ...], power: float) -> Tensor:
    """K^-power of the channels of drawings."""
    return balance_of(_drawn(shape), power)


def balance_of(features: Tensor, power: float = POWER) -> Tensor:
    """K^-power of the channels of these features (N, C, H, W)."""
    rows = features.transpose(0, 1).flatten(1).double()
    rows = rows - rows.mean(1, keepdim=True)
    variances, directions = torch.linalg.eigh(rows @ rows.T / rows.shape[1])
    scales = (variances.clamp(min=0) / variances[-1] + _FLOOR) ** -power
    balance: Tensor = ((directions * scales) @ directions.T).float()
    return balance
