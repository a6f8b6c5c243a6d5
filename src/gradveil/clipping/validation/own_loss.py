"""A loss that the model computes itself: ``model(**batch).loss``.

A number from inside the model is a mean over the examples only if it behaves like one. On the batches that are checked
it is differentiated in passes whose sums are thrown away: an example's norms must stay what they are when the other
examples are exchanged, and when half of them are left out. Until that was seen, and where it was not so, the number is
refused as a loss.

The usual cross-entropy is a mean over all tokens that are not ignored, so one example's labels change what every other
example counts. Its gradient is taken per example here: each example's loss is the mean over its own tokens. The value
that the user sees stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.clipping.clipped_functions import RefusedFunction
from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.refusals import refusal
from gradveil.clipping.validation.rehearsal import Comparison

NOT_SEEN = "it was not checked: the first batch had one example, or several processes train together"


class OwnLossFunction(torch.autograd.Function):
    """A loss from inside the model that was seen to be a mean over the examples."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, losses: OwnLosses) -> Tensor:
        ctx.losses = losses
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.losses.differentiate(float(g))
        return g, None


class _RowScale(torch.autograd.Function):
    """The same values; gradients of the rows are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return g * scale.to(g.dtype), None


class OwnLosses:
    """The scalars among a model's outputs, by their place: what was found of each."""

    def __init__(self) -> None:
        self._findings: dict[int, str] = {}  # empty: it is a mean over the examples
        self._factor: float | None = None  # by which the user multiplies it
        self.used = False  # since this was last set to False

    def look(
        self,
        places: Iterable[int],
        module: nn.Module,
        rehearse: Callable[..., Any],
        exchanged: Callable[[Tensor], Any],
        rows: int,
    ) -> None:
        """``places`` of the scalars among the outputs. ``exchanged``: from indices to the arguments with those rows."""
        for place in places:

            def differentiated(given: Any, place: int = place) -> Any:
                return rehearse(lambda: tensors_in(module(*given[0], **given[1]))[place].backward())

            comparison = Comparison(module, differentiated, exchanged, rows)
            finding = comparison.finding(sizes=False)
            if not finding and comparison.comparable:
                finding = _without_draws(module, Comparison(module, differentiated, exchanged, rows))
            self._findings[place] = finding if finding or comparison.comparable else "cannot be compared"

    def tap(self, place: int, loss: Tensor) -> Tensor:
        """A scalar output as the user gets it."""
        finding = self._findings.get(place, NOT_SEEN)
        found: Tensor = RefusedFunction.apply(loss, "scalar", finding) if finding else OwnLossFunction.apply(loss, self)
        return found

    def differentiate(self, factor: float) -> None:
        if self._factor is None:
            self._factor = factor
        if factor != self._factor:
            raise refusal("factor", f"{self._factor:g} and now {factor:g}")
        self.used = True


def _without_draws(module: nn.Module, comparison: Comparison) -> str:
    """Whether it depends on the number of examples: as in evaluation, since half of a batch draws other numbers."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        for child, _ in modes:
            child.training = False
        return comparison.finding(sizes=True)
    finally:
        for child, training in modes:
            child.training = training


def cross_entropy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> Any:
    """F.cross_entropy or F.nll_loss inside the model: with the gradient of each example's mean over its own tokens."""
    given = dict(
        zip(("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"), args, strict=False)
    )
    given |= kwargs
    x, target, weight = given["input"], given["target"], given.get("weight")
    ignored, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
    fits = target.dim() > 0 and len(target) % rows == 0 and x.shape[:1] == target.shape[:1] and rows > 1
    if reduction != "mean" or not fits or target.is_floating_point() or not x.requires_grad:
        return func(*args, **kwargs)
    counted = target != ignored
    counts = counted.to(x.dtype) if weight is None else weight[target.clamp(min=0)] * counted
    if weight is None and bool(counted.all()):
        return func(*args, **kwargs)
    own = counts.reshape(rows, -1).sum(1)
    scale = torch.where(own > 0, counts.sum() / (rows * own), torch.zeros_like(own))
    scale = scale.repeat_interleave(len(target) // rows).view(-1, *[1] * (x.dim() - 1))
    given["input"] = _RowScale.apply(x, scale)
    return func(**given)


_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
OWN = {F.cross_entropy, F.nll_loss}
