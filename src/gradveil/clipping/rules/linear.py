"""Linear layers on any number of dimensions.

Legend: B examples, T positions (all middle dimensions together), D inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping import performance
from gradveil.clipping.backends import cuda, native
from gradveil.clipping.per_sample_grads import (
    HALVES,
    PerSampleGrads,
    Weigh,
    as_multiplied,
    gram_sq_norms,
    keep_rows,
    norms_of_rows,
    row_sq_norms,
    weights_of,
    wide_pair,
)
from gradveil.clipping.rules.layer import LayerRule


def choose_formula(positions: int, inputs: int, outputs: int) -> str:
    """How to get at the norms, by cost in multiply-adds per example.

    rank-one   T = 1: |g| |x|, and then one product of scaled rows.                                T (D + O)
    gram       sum_st <x_s, x_t> <g_s, g_t>, for few positions of wide layers, and then one product. T^2 (D + O)
    direct     form the gradient, T D O: the work of the sum itself where the gradient is clipped on the way to it,
               and work done twice where the norms of other layers have to be known first.
    """
    forced = performance.settings().formula
    if positions == 1:
        return "rank-one"
    if forced in ("gram", "direct"):
        return forced
    return "gram" if positions * (inputs + outputs) < inputs * outputs else "direct"


def stays_half(g: Tensor) -> bool:
    """Whether the factors of a gradient are multiplied as they are, in half precision, and added up in float32.

    Tensor cores do that, and nothing is underestimated: the norm is of the gradient that comes out, and that gradient
    is what is scaled and added to the sum. Scaled *factors* in half precision would not do: what is rounded off them
    can be more than the sum of their products, and an example would exceed its bound.
    """
    return g.is_cuda and g.dtype in HALVES and MULTIPLIES_HALVES and performance.settings().formula != "gram"


MULTIPLIES_HALVES = "dtype" in torch.ops.aten.bmm.overloads()  # with a product in float32: since torch 2.8


_ONE = np.float32(1.0)


class LinearGrads(PerSampleGrads):
    """Gradients of y = x W^T + b; parameters: weight (O, D) and bias (O), those that train.

    See :func:`choose_formula` for the ways to the norm of one example's weight gradient sum_t g_t x_t^T.
    """

    keeps_gradients = False  # one product of scaled rows gives the sum
    half = False  # x and g are kept in half precision: see :func:`stays_half`
    _of_bias: Tensor | None = None

    def __init__(self, x: Tensor, g: Tensor, *, weight: bool, bias: bool) -> None:
        self.examples, self.device = x.shape[0], x.device
        self.weight, self.bias = weight, bias
        self.positions = math.prod(x.shape[1:-1])
        inputs, outputs = x.shape[-1], g.shape[-1]
        if weight and self.positions > 1 and stays_half(g):
            self.half, x = True, x.to(g.dtype)  # as autocast gave it to the layer
        else:
            x, g = wide_pair(as_multiplied(x, g), g)
        if x.dim() != 2:
            shape = (self.examples,) if self.positions == 1 else (self.examples, self.positions)
            x, g = x.reshape(*shape, inputs), g.reshape(*shape, outputs)
        self.x, self.g = x, g  # (B, D) and (B, O) where T = 1: small layers feel every view
        self.elements_per_example = inputs * outputs
        self.formula = choose_formula(self.positions, inputs, outputs) if weight else "rank-one"
        if self.half:
            self.formula = "direct"

    @classmethod
    def joined(cls, uses: Sequence[PerSampleGrads]) -> LinearGrads | None:
        """Several uses of one weight as one with all their positions; None where they are not of a kind."""
        kinds = {(type(u), u.weight, u.bias, u.x.shape[-1]) if isinstance(u, LinearGrads) else u for u in uses}
        if len(kinds) != 1 or not isinstance(uses[0], LinearGrads):
            return None
        same = [u for u in uses if isinstance(u, LinearGrads)]
        x, g = torch.cat([u.x_BTD for u in same], 1), torch.cat([u.g_BTO for u in same], 1)
        return type(uses[0])(x, g, weight=uses[0].weight, bias=uses[0].bias)

    @property
    def x_BTD(self) -> Tensor:
        return self.x if self.x.dim() == 3 else self.x.unsqueeze(1)

    @property
    def g_BTO(self) -> Tensor:
        return self.g if self.g.dim() == 3 else self.g.unsqueeze(1)

    def _drop(self, keep: Tensor) -> None:
        self.x, self.g, self._of_bias = keep_rows(self.x, keep), keep_rows(self.g, keep), None

    def per_example(self, rows: slice) -> list[Tensor]:
        return self._gradients(rows)

    def _gradients(self, rows: slice) -> list[Tensor]:
        x, g = self.x_BTD[rows], self.g_BTO[rows]
        if self.half:
            return self.half_gradients(rows)
        found = [torch.bmm(g.mT, x)] if self.weight else []
        return found + ([g.sum(1)] if self.bias else [])

    def half_gradients(self, rows: slice, more: int = 0) -> list[Tensor]:
        """The gradients in float32, of factors in half precision; that of the weight with so many more rows of zeros.

        A product with 50257 rows takes several times as long as one with 50264: its factor's rows are not aligned.
        """
        x, g = self.x[rows], self.g[rows]
        factor = F.pad(g, (0, more)) if more else g
        return products_of_halves(factor, x, g if self.bias else None)

    def sq_norms(self) -> list[Tensor]:
        if self.formula == "direct":
            return super().sq_norms()
        if self.formula == "gram":
            return [self._gram_sq_norms()] + ([row_sq_norms(self._bias_gradients)] if self.bias else [])
        of_g = row_sq_norms(self._bias_gradients)
        return ([row_sq_norms(self.x) * of_g] if self.weight else []) + ([of_g] if self.bias else [])

    def _gram_sq_norms(self) -> Tensor:
        kernels = native.for_tensors(self.x, self.g)
        if kernels is None:
            return gram_sq_norms(torch.bmm(self.x, self.x.mT), torch.bmm(self.g, self.g.mT))
        squares, self._of_bias = kernels.gram_squares(self.x, self.g, bias=self.bias)
        return squares.float()

    @property
    def _bias_gradients(self) -> Tensor:
        """(B, O)"""
        if self._of_bias is None:
            self._of_bias = self.g.sum(1) if self.positions != 1 else self.g
        return self._of_bias

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if self.half:
            return super().weighted_sums(weights)
        found = []
        if self.weight:
            w = weights[0].to(self.g.dtype).view(-1, *[1] * (self.g.dim() - 1))
            narrow = self.x.shape[-1] < self.g.shape[-1]  # there is less of x to scale
            x, g = (self.x * w, self.g) if narrow else (self.x, self.g * w)
            rows = self.examples * self.positions  # -1 would not do for no inputs or outputs at all
            found.append(g.reshape(rows, g.shape[-1]).mT @ x.reshape(rows, x.shape[-1]))
        if self.bias:
            found.append(weights[-1].to(self.g.dtype) @ self._bias_gradients)
        return self._in_order(found)

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        return super().clipped_sums(weigh) if self.formula == "direct" else self._clipped_by_norms(weigh)

    def clipped_at_once(self, bound: float) -> native.Clipped | None:
        kernels = native.for_tensors(self.x, self.g)
        if kernels is None:
            plain = self.positions == 1 and self.weight and self.x.dtype is torch.float32 and self.x.is_cpu
            return self._clipped_rank_one(bound) if plain and not torch.is_grad_enabled() else None
        if self.positions == 1:
            found = kernels.rank_one_clip(self.x, self.g, weight=self.weight, bias=self.bias, bound=bound)
        elif self.weight and performance.settings().formula != "gram":
            found = kernels.linear_clip(self.x, self.g, bias=self.bias, bound=bound)
        else:
            return None
        found.sums = self._in_order(found.sums)
        return found

    def _clipped_rank_one(self, bound: float) -> native.Clipped:
        """Norms, weights and sums in the fewest operations: a small layer feels each of them.

        What there is one number of per example goes through numpy, whose calls cost a fraction of torch's.
        """
        x, g = self.x, self.g
        norms = norms_of_rows(g).numpy()
        of_x = norms_of_rows(x).numpy()
        norms *= np.hypot(of_x, _ONE) if self.bias else of_x
        weights, finite = weights_of(norms, bound)
        lost = 0
        if finite is not None:
            keep = torch.from_numpy(finite)
            lost = len(x) - int(keep.sum())
            x, g = keep_rows(x, keep), keep_rows(g, keep)
        w, outputs = torch.from_numpy(weights), g.t()
        sums = [torch.mm(outputs * w, x)] + ([torch.mv(outputs, w)] if self.bias else [])
        return native.Clipped(self._in_order(sums), torch.from_numpy(norms), w, lost)


def products_of_halves(a: Tensor, b: Tensor, sum_of: Tensor | None) -> list[Tensor]:
    """a^T b of each example (B, T, ...) in half precision, and the sum of a factor over its positions; in float32."""
    if a.is_cuda:
        return [cuda.product_of_halves(a, b)] + ([] if sum_of is None else [cuda.sum_over_positions(sum_of)])
    # What no tensor core does.
    return [torch.bmm(a.float().mT, b.float())] + ([] if sum_of is None else [sum_of.sum(1, dtype=torch.float32)])


class LinearRule(LayerRule):
    """x W^T + b."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.linear(x, weight, bias), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        to_x = None
        if needs[0]:
            to_x = g @ weight if g.dtype == weight.dtype == x.dtype else (g @ weight.to(g.dtype)).to(x.dtype)
        return to_x, LinearGrads(x, g, weight=needs[1], bias=needs[2])


class TransposedLinearGrads(LinearGrads):
    """Weight stored as (D, O)."""

    def per_example(self, rows: slice) -> list[Tensor]:
        found = self._gradients(rows)
        return [found[0].mT, *found[1:]] if self.weight and not self.half else found

    def half_gradients(self, rows: slice, more: int = 0) -> list[Tensor]:
        assert not more, "rows of zeros would be columns here"
        x, g = self.x[rows], self.g[rows]
        return products_of_halves(x, g, g if self.bias else None)

    def _in_order(self, sums: list[Tensor]) -> list[Tensor]:
        return [sums[0].mT.contiguous(), *sums[1:]] if self.weight and not self.half else sums


class Conv1DRule(LayerRule):
    """x W + b: a linear layer whose weight is stored as (inputs, outputs), as in Hugging Face's GPT-2."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows = x.reshape(-1, x.shape[-1])
        # Not x @ weight + bias: under autocast that sum would be of float32, and so would be all that follows from it.
        out = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return out.view(*x.shape[:-1], weight.shape[1]), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        to_x = (g @ weight.mT.to(g.dtype)).to(x.dtype) if needs[0] else None
        return to_x, TransposedLinearGrads(x, g, weight=needs[1], bias=needs[2])
