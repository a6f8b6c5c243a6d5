"""Linear layers on any number of dimensions.

Legend: B examples, T positions (all middle dimensions together), D inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping.rules.layer import LayerRule
from gradveil.clipping.uses import Use, Weigh, wide_pair


class LinearUse(Use):
    """Gradients of y = x W^T + b; parameters: weight (O, D) and bias (O), those that train.

    Three ways to the norm of one example's weight gradient sum_t g_t x_t^T, chosen by their cost:
    rank one (T = 1: |g| |x|), Gram (sum_st <x_s, x_t> <g_s, g_t>, for few positions of wide layers),
    and direct (form the gradient, and clip it on the way to the sum).
    """

    def __init__(self, x: Tensor, g: Tensor, *, weight: bool, bias: bool) -> None:
        self.examples, self.device = x.shape[0], x.device
        self.weight, self.bias = weight, bias
        positions = math.prod(x.shape[1:-1])
        x, g = wide_pair(x, g)
        self.x_BTD = x.reshape(self.examples, positions, x.shape[-1])
        self.g_BTO = g.reshape(self.examples, positions, g.shape[-1])
        inputs, outputs = x.shape[-1], g.shape[-1]
        self.elements_per_example = inputs * outputs
        if positions == 1 or not weight:
            self.formula = "rank-one"
        elif positions * (inputs + outputs) < inputs * outputs:
            self.formula = "gram"
        else:
            self.formula = "direct"

    def _drop(self, keep: Tensor) -> None:
        zero = self.g_BTO.new_zeros(())
        self.x_BTD = torch.where(keep.view(-1, 1, 1), self.x_BTD, zero)
        self.g_BTO = torch.where(keep.view(-1, 1, 1), self.g_BTO, zero)

    def per_example(self, rows: slice) -> list[Tensor]:
        x, g = self.x_BTD[rows], self.g_BTO[rows]
        found = [torch.bmm(g.mT, x)] if self.weight else []
        return found + ([g.sum(1)] if self.bias else [])

    def sq_norms(self) -> list[Tensor]:
        if self.formula == "direct":
            return super().sq_norms()
        g_BO = self.g_BTO.sum(1) if self.g_BTO.shape[1] != 1 else self.g_BTO[:, 0]
        bias_sq = torch.linalg.vecdot(g_BO, g_BO)
        found = []
        if self.weight and self.formula == "rank-one":
            x_BD = self.x_BTD[:, 0]
            found.append(torch.linalg.vecdot(x_BD, x_BD) * bias_sq)
        elif self.weight:
            found.append(self._gram_sq_norms())
        return found + ([bias_sq] if self.bias else [])

    def _gram_sq_norms(self) -> Tensor:
        """The Gram form cancels: its rounding error is bounded and added, so the norm is never underestimated."""
        xx = torch.bmm(self.x_BTD, self.x_BTD.mT)
        gg = torch.bmm(self.g_BTO, self.g_BTO.mT)
        total = torch.linalg.vecdot(xx.flatten(1).double(), gg.flatten(1).double())
        lengths = (xx.diagonal(dim1=1, dim2=2).clamp(min=0) * gg.diagonal(dim1=1, dim2=2).clamp(min=0)).sqrt().sum(1)
        margin = 4.0 * torch.finfo(xx.dtype).eps * lengths.double().square()
        safe: Tensor = (total.clamp(min=0) + margin).to(xx.dtype)
        return safe

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        scaled: dict[int, Tensor] = {}
        for w in weights:
            if id(w) not in scaled:
                scaled[id(w)] = self.g_BTO * w.to(self.g_BTO.dtype).view(-1, 1, 1)
        found = []
        if self.weight:
            found.append(scaled[id(weights[0])].flatten(0, 1).mT @ self.x_BTD.flatten(0, 1))
        return found + ([scaled[id(weights[-1])].sum((0, 1))] if self.bias else [])

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        if self.formula == "direct":
            return super().clipped_sums(weigh)
        weights, keep = weigh(slice(None), self.sq_norms())
        if keep is not None:
            self.keep(keep)
        return self.weighted_sums(weights)


class LinearRule(LayerRule):
    """nn.Linear."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.linear(x, weight, bias), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Use]:
        to_x = (g @ weight.to(g.dtype)).to(x.dtype) if needs[0] else None
        return to_x, LinearUse(x, g, weight=needs[1], bias=needs[2])


class _Transposed(LinearUse):
    """Weight stored as (D, O)."""

    def per_example(self, rows: slice) -> list[Tensor]:
        found = super().per_example(rows)
        return [found[0].mT, *found[1:]] if self.weight else found

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        found = super().weighted_sums(weights)
        return [found[0].mT.contiguous(), *found[1:]] if self.weight else found


class Conv1DRule(LayerRule):
    """The Conv1D of Hugging Face's GPT-2: a linear layer whose weight is stored as (inputs, outputs)."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = x @ weight
        return out if bias is None else out + bias, ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Use]:
        to_x = (g @ weight.mT.to(g.dtype)).to(x.dtype) if needs[0] else None
        return to_x, _Transposed(x, g, weight=needs[1], bias=needs[2])
