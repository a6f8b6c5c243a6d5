"""Convolutions of one, two and three dimensions, and transposed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping.per_sample_grads import PerSampleGrads, as_multiplied
from gradveil.clipping.rules.conv_use import ConvGrads
from gradveil.clipping.rules.layer import LayerRule

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class ConvRule(LayerRule):
    """Any stride, dilation, groups and padding by zeros; other padding is an operation before it."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.dims = settings.dims
        self.least_dims = self.dims + 2
        self.padding = settings.padding

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        m = self.settings
        return _CONV[self.dims](x, weight, bias, m.stride, self.padding, m.dilation, m.groups), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        m, to_x = self.settings, None
        if needs[0]:
            to_x = torch.ops.aten.convolution_backward(
                g,
                x.to(g.dtype),
                weight.to(g.dtype),
                None,
                m.stride,
                self.padding,
                m.dilation,
                False,
                [0] * self.dims,
                m.groups,
                (True, False, False),
            )[0].to(x.dtype)
        use = ConvGrads(
            as_multiplied(x, g),
            g,
            g,
            weight=needs[1],
            bias=needs[2],
            kernel=tuple(weight.shape[2:]),
            stride=m.stride,
            padding=self.padding,
            dilation=m.dilation,
            groups=m.groups,
        )
        return to_x, use


class ConvTransposeRule(LayerRule):
    """Transposed convolutions."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.dims = settings.dims
        self.least_dims = self.dims + 2

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        m = self.settings
        run = _CONV_TRANSPOSE[self.dims]
        return run(x, weight, bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        m = self.settings
        to_x = None
        # Output padding of a stride or more leaves pixels at the end that no input pixel reaches.
        even = all(extra < stride for extra, stride in zip(m.output_padding, m.stride, strict=True))
        if needs[0]:
            to_x = _CONV[self.dims](g, weight.to(g.dtype), None, m.stride, m.padding, m.dilation, m.groups).to(x.dtype)
            to_x = to_x[tuple(slice(size) for size in x.shape)]
        use = ConvGrads(
            g,
            as_multiplied(x, g),
            g,
            weight=needs[1],
            bias=needs[2],
            kernel=tuple(weight.shape[2:]),
            stride=m.stride,
            padding=m.padding,
            dilation=m.dilation,
            groups=m.groups,
            transposed=True,
            one_contraction=even,
        )
        return to_x, use
