"""Averaged weights: a moving average of the weights that a run went through.

The noise of single steps averages out of it. It is computed from released weights alone, so it costs no privacy.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class AveragedModel:
    """A copy of a model whose weights follow it: w <- d w + (1 - d) (the model's), d = min(decay, (1 + t)/(10 + t)).

    The smaller d of the first steps t lets go of where training began.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).requires_grad_(False), decay
        self._followed: list[Tensor] = list(model.parameters())
        self._own: list[Tensor] = list(self.module.parameters())

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """The model has taken its ``step``-th step."""
        share = 1.0 - min(self.decay, (1.0 + step) / (10.0 + step))
        torch._foreach_lerp_(self._own, self._followed, share)
