"""A weight that several layers share, such as a language model's input and output embedding.

The gradient of an example is the sum over the layers, so its norm needs their products too:

    |E + F|^2 = |E|^2 + |F|^2 + 2 <E, F>

Between the layers that share weights in practice these products come from the factors, without forming a gradient the
size of a vocabulary. Legend: B examples, T and S positions, V vocabulary (outputs), D embedding size (inputs).

    linear and linear         E = sum_t g_t x_t^T                    <E, F> = sum_ts <g_t, g'_s> <x_t, x'_s>
    linear and embedding      F = sum_s e(token_s) r_s^T             <E, F> = sum_ts g_t[token_s] <x_t, r_s>
    embedding and embedding                                          <E, F> = sum_ts [token_t = token_s] <r_t, r'_s>

Where E and F nearly cancel, so do these terms, and what is left of them is rounding. It is bounded by the lengths of
what was added up, and that bound is added: the norm is never underestimated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.clipping.operations.sources import DerivedGrads
from gradveil.clipping.per_sample_grads import PerSampleGrads, Weigh, wide_pair
from gradveil.clipping.rules.embedding import EmbeddingGrads
from gradveil.clipping.rules.linear import LinearGrads, TransposedLinearGrads


class TiedGrads(PerSampleGrads):
    """Uses of several layers; ``places`` says which of all their parameters each use's are."""

    def __init__(
        self, uses: Sequence[PerSampleGrads], places: Sequence[Sequence[int]], parameters: Sequence[Tensor]
    ) -> None:
        self.uses, self.places = list(uses), [list(p) for p in places]
        self.shapes = [tuple(p.shape) for p in parameters]
        self.examples, self.device = uses[0].examples, uses[0].device
        self.elements_per_example = sum(p.numel() for p in parameters)

    def per_example(self, rows: slice) -> list[Tensor]:
        count = len(range(self.examples)[rows])
        return self._gathered([use.per_example(rows) for use in self.uses], [(count, *shape) for shape in self.shapes])

    def _gathered(self, found: Sequence[Sequence[Tensor]], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """What each use has to say of its parameters, added up for every parameter; nothing said: zero."""
        totals: list[Tensor | None] = [None] * len(self.shapes)
        for tensors, places in zip(found, self.places, strict=True):
            for tensor, place in zip(tensors, places, strict=True):
                before = totals[place]
                totals[place] = tensor if before is None else before + tensor
        like = found[0][0]
        return [like.new_zeros(shape) if t is None else t for t, shape in zip(totals, shapes, strict=True)]

    def _drop(self, keep: Tensor) -> None:
        for use in self.uses:
            use.keep(keep)

    def sq_norms(self) -> list[Tensor]:
        pairs = [
            (i, j)
            for i in range(len(self.uses))
            for j in range(i)
            if set(self.places[i]) & set(self.places[j]) and not _are_apart(self.uses[i], self.uses[j])
        ]
        products = {pair: self._product(*pair) for pair in pairs}
        if any(product is None for product in products.values()):
            return super().sq_norms()
        squares = self._gathered([use.sq_norms() for use in self.uses], [(self.examples,)] * len(self.shapes))
        wide = {self.places[i][0]: squares[self.places[i][0]].double() for i, _ in pairs}
        for (i, _), product in products.items():
            assert product is not None
            wide[self.places[i][0]] += 2.0 * product.double()
        for place, total in wide.items():
            lengths = sum(
                _length(use) for use, places in zip(self.uses, self.places, strict=True) if places[0] == place
            )
            margin = 4.0 * torch.finfo(squares[place].dtype).eps * torch.as_tensor(lengths).double().square()
            squares[place] = (total.clamp(min=0.0) + margin).to(squares[place].dtype)
        return squares

    def _product(self, i: int, j: int) -> Tensor | None:
        """<E, F> of two uses that share their first parameter and no other; None: not known for such layers."""
        if self.places[i][0] != self.places[j][0] or set(self.places[i][1:]) & set(self.places[j][1:]):
            return None
        return weight_product(self.uses[i], self.uses[j])

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        return self._clipped_by_norms(weigh)

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if self._cached:
            return super().weighted_sums(weights)
        own = [[weights[place] for place in places] for places in self.places]
        return self._gathered([use.weighted_sums(w) for use, w in zip(self.uses, own, strict=True)], self.shapes)


def _are_apart(first: PerSampleGrads, second: PerSampleGrads) -> bool:
    """Whether the uses reach no element of a parameter both, so that their product is zero."""
    return isinstance(first, DerivedGrads) and first.is_apart_from(second)


def _length(use: PerSampleGrads) -> Tensor:
    """The sum of the lengths of what an example's weight gradient is added up from: at least its norm."""
    if isinstance(use, EmbeddingGrads):
        lengths = torch.linalg.vector_norm(use.g, dim=2)
    else:
        assert isinstance(use, LinearGrads)
        x, g = wide_pair(use.x_BTD, use.g_BTO)
        lengths = torch.linalg.vector_norm(x, dim=2) * torch.linalg.vector_norm(g, dim=2)
    total: Tensor = lengths.sum(1)
    return total


def weight_product(first: PerSampleGrads, second: PerSampleGrads) -> Tensor | None:
    """The product, per example, of the weight gradients of two uses, from their factors; None: not known."""
    if isinstance(first, EmbeddingGrads) and not isinstance(second, EmbeddingGrads):
        first, second = second, first
    if isinstance(first, EmbeddingGrads) and isinstance(second, EmbeddingGrads):
        rows = torch.bmm(*wide_pair(first.g, second.g.mT))
        return (rows * (first.x.unsqueeze(2) == second.x.unsqueeze(1))).flatten(1).sum(1)
    if not _has_weight(first):
        return None
    assert isinstance(first, LinearGrads)
    if isinstance(second, EmbeddingGrads):
        if isinstance(first, TransposedLinearGrads):
            return None
        inputs = torch.bmm(*wide_pair(first.x_BTD, second.g.mT))  # (B, T, S)
        tokens = second.x.unsqueeze(1).expand(-1, first.positions, -1)
        return (inputs * first.g_BTO.gather(2, tokens)).flatten(1).sum(1)
    if not _has_weight(second) or type(first) is not type(second):
        return None
    assert isinstance(second, LinearGrads)
    inputs = torch.bmm(*wide_pair(first.x_BTD, second.x_BTD.mT))
    outputs = torch.bmm(*wide_pair(first.g_BTO, second.g_BTO.mT))
    product: Tensor = torch.linalg.vecdot(inputs.flatten(1).double(), outputs.flatten(1).double())
    return product.to(inputs.dtype)


def _has_weight(use: PerSampleGrads) -> bool:
    return isinstance(use, LinearGrads) and use.weight
