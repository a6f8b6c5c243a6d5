"""What kernels give back of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Clipped:
    """What became of a batch: sums of clipped gradients, and of each example what it was clipped by."""

    sums: list[Tensor]  # of weight and bias, those that train
    norms: Tensor  # (B,) before clipping; float64 by a kernel
    weights: Tensor  # (B,) min(1, bound / norm), 0 where the norm is not finite
    not_finite: int  # how many
