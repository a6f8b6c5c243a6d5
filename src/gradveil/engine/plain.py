"""Training without privacy, for comparison: the same loader, parts and ranks, and no clipping or noise.

``.grad`` is that of the user's loss. Where a batch comes in physical parts, or over several processes, the optimizer's
step waits for the last part and takes the gradient of the loss over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.engine.batches import Batches
from gradveil.errors import ConfigError
from gradveil.mechanism.distributed.ranks import Ranks


class HiddenGradients:
    """Gradients that an optimizer must not find during a step: their batch is not whole yet."""

    def __init__(self) -> None:
        self._of: list[tuple[Tensor, Tensor | None]] = []

    def hide(self, parameters: Sequence[Tensor]) -> None:
        self._of = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def show(self) -> None:
        of, self._of = self._of, []
        for parameter, grad in of:
            parameter.grad = grad


class PlainStep:
    """The hook before the optimizer's step of a run without privacy."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        batches: Batches,
        ranks: Ranks,
        *,
        loss_reduction: str,
        count: Callable[[], None],
    ) -> None:
        self._parameters, self._batches, self._ranks = list(parameters.values()), batches, ranks
        self._mean, self._count = loss_reduction == "mean", count
        self._kept: dict[nn.Parameter, Tensor] = {}

    def clear(self) -> None:
        self._kept.clear()

    def __call__(self, *_: Any) -> None:
        ticket = self._batches.ticket
        if ticket is not None and not ticket.last:
            self._keep_part()
            return
        if self._kept or self._ranks.several:
            self._take_whole_batch()
        self._count()

    def _keep_part(self) -> None:
        """Add this part's gradients to what is kept, and leave the optimizer nothing to update with."""
        assert self._batches.ticket is not None
        weight = float(self._batches.ticket.size) if self._mean else 1.0  # the mean of parts weighs each by its size
        for parameter in self._parameters:
            if parameter.grad is not None and weight:  # the mean loss of no example is not a number
                grad = parameter.grad * weight if weight != 1.0 else parameter.grad
                before = self._kept.get(parameter)
                self._kept[parameter] = grad if before is None else before + grad
            parameter.grad = None

    def _take_whole_batch(self) -> None:
        if self._batches.ticket is None:
            raise ConfigError(
                "over several processes a batch must come from the loader that make_private returned: it says how many "
                "examples each process has."
            )
        self._keep_part()
        for parameter in self._parameters:
            kept = self._kept.pop(parameter, None)
            parameter.grad = torch.zeros_like(parameter) if kept is None and self._ranks.several else kept
        grads = [p.grad for p in self._parameters if p.grad is not None]
        self._ranks.add_up(grads)
        if self._mean:
            (drawn,) = self._ranks.total([self._batches.ticket.drawn], self._parameters[0])
            torch._foreach_div_(grads, max(drawn, 1.0))
