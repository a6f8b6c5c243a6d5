"""What every rule answers: run the layer, differentiate its input, and say what its use was."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradveil.clipping.per_sample_grads import PerSampleGrads


class LayerRule:
    """A layer y = f(x; weight, bias) on one tensor with the batch first. ``least_dims`` counts the batch dimension."""

    least_dims = 2

    def __init__(self, settings: Any) -> None:
        """``settings``: the arguments of the operation beside its tensors."""
        self.settings = settings

    def prepare(self, x: Tensor) -> Tensor:
        """What ordinary autograd does before the layer proper, such as padding."""
        return x

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, and what is kept for the backward pass beside input and weight."""
        raise NotImplementedError

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        """Gradient of the input (where ``needs[0]``), and the use (of weight and bias where ``needs[1:]``)."""
        raise NotImplementedError
