"""Embeddings: gradients that live in the rows of the tokens an example has. Never a one-hot matrix.

Legend: B examples, T tokens of an example, V vocabulary, D embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping.per_sample_grads import PerSampleGrads, Weigh, at_least_float32, keep_rows
from gradveil.clipping.rules.layer import LayerRule
from gradveil.errors import UnsupportedModelError


class EmbeddingGrads(PerSampleGrads):
    """Gradient rows g_BTD at tokens x_BT; an example's repeated tokens add up before the norm is taken."""

    def __init__(self, x_BT: Tensor, g_BTD: Tensor, shape: tuple[int, int]) -> None:
        self.examples, self.device = x_BT.shape[0], x_BT.device
        self.x, self.g, self.shape = x_BT, at_least_float32(g_BTD), shape
        self.elements_per_example = shape[0] * shape[1]

    def _drop(self, keep: Tensor) -> None:
        self.g = keep_rows(self.g, keep)

    def per_example(self, rows: slice) -> list[Tensor]:
        x, g = self.x[rows], self.g[rows]
        out = g.new_zeros((len(x), *self.shape))
        return [out.scatter_add_(1, x.unsqueeze(2).expand_as(g), g)]

    def sq_norms(self) -> list[Tensor]:
        # Sort an example's tokens; equal ones are then neighbours, and their rows are summed as runs.
        order = self.x.argsort(dim=1)
        tokens = self.x.gather(1, order)
        rows = self.g.gather(1, order.unsqueeze(2).expand_as(self.g))
        starts = torch.ones_like(tokens, dtype=torch.bool)
        starts[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
        run = starts.cumsum(1) - 1  # (B, T): which run a token belongs to
        summed = torch.zeros_like(rows).scatter_add_(1, run.unsqueeze(2).expand_as(rows), rows)
        flat = summed.flatten(1)
        return [torch.linalg.vecdot(flat, flat)]

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        scaled = self.g * weights[0].to(self.g.dtype).view(-1, 1, 1)
        out = self.g.new_zeros(self.shape)
        return [out.index_add_(0, self.x.flatten(), scaled.flatten(0, 1))]

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        weights, keep = weigh(slice(None), self.sq_norms())
        if keep is not None:
            self.keep(keep)
        return self.weighted_sums(weights)


def _refuse_batch_dependence(settings: Any, name: str) -> None:
    for option, why in (
        ("scale_grad_by_freq", "scales gradients by counts over the whole batch"),
        ("max_norm", "changes weights in the forward pass, by tokens of the private batch"),
    ):
        if getattr(settings, option):
            raise UnsupportedModelError(
                f"{name} with {option} {why}, which per-example clipping cannot follow. Leave it out."
            )


class EmbeddingRule(LayerRule):
    """Tokens of any shape; ``padding_idx`` gets no gradient."""

    least_dims = 1

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        _refuse_batch_dependence(settings, "Embedding")

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.embedding(x, weight), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        tokens = x.reshape(x.shape[0], math.prod(x.shape[1:]))  # -1 would not do for no tokens at all
        rows = g.reshape(*tokens.shape, g.shape[-1])
        if self.settings.padding_idx is not None:
            rows = torch.where((tokens == self.settings.padding_idx).unsqueeze(2), rows.new_zeros(()), rows)
        return None, EmbeddingGrads(tokens, rows, (weight.shape[0], weight.shape[1]))
