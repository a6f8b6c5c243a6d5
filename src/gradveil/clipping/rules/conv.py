"""Convolutions of one, two and three dimensions, and transposed ones.

Legend: B examples, C input channels, O output channels, G groups, L output pixels, K kernel elements.
Per-example gradients come from one batched product of the output gradient with the patches that each output
pixel saw. That product *is* the work of the weight gradient, so clipping it on the way to the sum is nearly free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.clipping.rules.layer import LayerRule
from gradveil.clipping.uses import Use, keep_rows, wide_pair
from gradveil.kernels import native

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class ConvUse(Use):
    """Pairs of a field (from which patches are cut) and a map (one value per patch).

    A convolution cuts patches from its input and its map is the output gradient; a transposed one cuts
    them from the output gradient and its map is the input. Parameters: weight (map channels, field channels
    / G, *kernel) and bias, those that train; the bias gradient sums the output gradient over its pixels.
    """

    def __init__(
        self,
        field: Tensor,
        map_: Tensor,
        g: Tensor,
        *,
        weight: bool,
        bias: bool,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        transposed: bool = False,
        one_contraction: bool = True,
    ) -> None:
        self.examples, self.device = field.shape[0], field.device
        self.weight, self.bias = weight, bias
        self.transposed, self.one_contraction = transposed, one_contraction
        self.field, self.map = wide_pair(field, map_)
        self.g = self.field if transposed else self.map
        self.kernel, self.stride, self.padding, self.dilation, self.groups = kernel, stride, padding, dilation, groups
        taps, pixels = math.prod(kernel), math.prod(map_.shape[2:])
        self.elements_per_example = field.shape[1] * taps * max(pixels, map_.shape[1] // groups)

    def _drop(self, keep: Tensor) -> None:
        self.field, self.map = keep_rows(self.field, keep), keep_rows(self.map, keep)
        self.g = self.field if self.transposed else self.map

    def per_example(self, rows: slice) -> list[Tensor]:
        found = []
        if self.weight:
            map_ = self.map[rows]
            b, channels = map_.shape[:2]
            patches = self._patches(self.field[rows], tuple(map_.shape[2:]))  # (b, G, C/G K, L)
            product = map_.reshape(b * self.groups, channels // self.groups, -1) @ patches.flatten(0, 1).mT
            found.append(product.reshape(b, channels, -1, *self.kernel))
        return found + ([self.g[rows].flatten(2).sum(2)] if self.bias else [])

    def native_clipped_sums(self, bound: float) -> tuple[list[Tensor], Tensor] | None:
        kernels = native.kernels() if native.usable(self.field, self.map) else None
        if kernels is None or self.transposed or not self.weight or len(self.kernel) > 2:
            return None
        lift = len(self.kernel) == 1  # one dimension is two, the first of them of size one
        weight, bias, squares = kernels.conv2d_clip(
            self.field.unsqueeze(2) if lift else self.field,
            self.map.unsqueeze(2) if lift else self.map,
            kernel=(1, *self.kernel) if lift else self.kernel,
            stride=(1, *self.stride) if lift else self.stride,
            padding=(0, *self.padding) if lift else self.padding,
            dilation=(1, *self.dilation) if lift else self.dilation,
            groups=self.groups,
            bias=self.bias,
            bound=bound,
        )
        found = [weight.reshape(self.map.shape[1], -1, *self.kernel)]
        return found + ([bias] if self.bias else []), squares

    def _patches(self, x: Tensor, pixels: tuple[int, ...]) -> Tensor:
        """Patches from a strided view: one copy, and no kernel launch per example (as F.unfold has on CUDA)."""
        if any(self.padding):
            x = F.pad(x, [p for width in reversed(self.padding) for p in (width, width)])
        x = x.contiguous()
        b, c = x.shape[:2]
        strides = x.stride()
        view = x.as_strided(
            (b, c, *self.kernel, *pixels),
            (
                *strides[:2],
                *(s * d for s, d in zip(strides[2:], self.dilation, strict=True)),
                *(s * d for s, d in zip(strides[2:], self.stride, strict=True)),
            ),
        )
        return view.reshape(b, self.groups, c // self.groups * math.prod(self.kernel), math.prod(pixels))

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if self._cached or any(w is not weights[0] for w in weights[1:]) or not self.one_contraction:
            return super().weighted_sums(weights)
        w = weights[0].to(self.map.dtype).view(-1, *[1] * (self.map.dim() - 1))
        found = []
        if self.weight:
            channels, fields = self.map.shape[1], self.field.shape[1]
            shape = (channels, fields // self.groups, *self.kernel)
            found.append(
                torch.ops.aten.convolution_backward(
                    self.map * w,
                    self.field,
                    self.map.new_empty(1).expand(shape),
                    None,
                    self.stride,
                    self.padding,
                    self.dilation,
                    False,
                    [0] * len(self.kernel),
                    self.groups,
                    (False, True, False),
                )[1]
            )
        if self.bias:
            found.append((self.g.flatten(2).sum(2) * weights[-1].to(self.g.dtype).view(-1, 1)).sum(0))
        return found


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
