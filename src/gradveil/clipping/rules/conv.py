"""Convolutions of one, two and three dimensions, and transposed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.clipping.rules.conv_use import ConvUse
from gradveil.clipping.rules.layer import LayerRule
from gradveil.clipping.uses import Use

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class ConvRule(LayerRule):
    """nn.Conv1d, 2d, 3d: any stride, dilation, groups, padding mode, and "same"."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.dims = len(self.module.kernel_size)
        self.least_dims = self.dims + 2
        # Padding that is not plain zeros is done before, by ordinary autograd; "same" may be uneven.
        self.padded = self.module.padding_mode != "zeros" or isinstance(self.module.padding, str)
        self.padding = (0,) * self.dims if self.padded else tuple(self.module.padding)

    def prepare(self, x: Tensor) -> Tensor:
        if not self.padded:
            return x
        mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
        return F.pad(x, self.module._reversed_padding_repeated_twice, mode=mode)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        m = self.module
        return _CONV[self.dims](x, weight, bias, m.stride, self.padding, m.dilation, m.groups), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Use]:
        m, to_x = self.module, None
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
        use = ConvUse(
            x,
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
    """nn.ConvTranspose1d, 2d, 3d."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.dims = len(self.module.kernel_size)
        self.least_dims = self.dims + 2

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        m = self.module
        run = _CONV_TRANSPOSE[self.dims]
        return run(x, weight, bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Use]:
        m = self.module
        to_x = None
        # Output padding of a stride or more leaves pixels at the end that no input pixel reaches.
        even = all(extra < stride for extra, stride in zip(m.output_padding, m.stride, strict=True))
        if needs[0]:
            to_x = _CONV[self.dims](g, weight.to(g.dtype), None, m.stride, m.padding, m.dilation, m.groups).to(x.dtype)
            to_x = to_x[tuple(slice(size) for size in x.shape)]
        use = ConvUse(
            g,
            x,
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
