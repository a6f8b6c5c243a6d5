"""A logical batch that comes in physical parts: gradients put aside until the last part is there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class PhysicalParts:
    """Sums of gradients, kept away from the optimizer between the parts of a batch."""

    def __init__(self) -> None:
        self.kept: dict[nn.Parameter, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.kept)

    def put_aside(self, parameters: Iterable[nn.Parameter], *, weight: float = 1.0) -> None:
        """Add ``weight`` times each gradient to what is kept, and leave the optimizer nothing to update with."""
        for parameter in parameters:
            if parameter.grad is not None:
                grad = parameter.grad * weight if weight != 1.0 else parameter.grad
                before = self.kept.get(parameter)
                self.kept[parameter] = grad if before is None else before + grad
                parameter.grad = None

    def take_up(self) -> None:
        """Add what is kept to the gradients of the last part."""
        for parameter, kept in self.kept.items():
            parameter.grad = kept if parameter.grad is None else parameter.grad + kept
        self.kept.clear()

    def clear(self) -> None:
        self.kept.clear()
