"""One use of a convolution: the ways to its per-example gradients, norms and sums.

Legend: B examples, C input channels, O output channels, G groups, L output pixels, K kernel elements.
Per-example gradients come from one batched product of the output gradient with the patches that each output
pixel saw. That product *is* the work of the weight gradient, so clipping it on the way to the sum is nearly free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping import performance
from gradveil.clipping.backends import native
from gradveil.clipping.per_sample_grads import (
    PerSampleGrads,
    Weigh,
    gram_sq_norms,
    keep_rows,
    row_sq_norms,
    wide_pair,
    workspace,
)
from gradveil.clipping.rules.conv_plan import VECTOR, patches_of_a_row, plan_for


def _is_plain(t: Tensor) -> bool:
    """Whether the workspace has buffers of its kind."""
    return t.is_cpu and t.dtype is torch.float32


class ConvGrads(PerSampleGrads):
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
        self.taps, self.pixels = math.prod(kernel), math.prod(map_.shape[2:])
        self._buffer: tuple[Tensor, Tensor, native.ConvGeometry] | None = None  # gradients of weight and bias, in C++
        self._lent = False  # whether the buffer is the workspace's
        self._dropped: Tensor | None = None
        self._plan = plan_for(
            field.shape,
            map_.shape,
            kernel,
            stride,
            padding,
            dilation,
            groups,
            transposed,
            weight and one_contraction,
            self.device.type == "cpu",
            performance.settings(),
        )
        self.elements_per_example, self.formula = self._plan.elements, self._plan.formula

    # ---- per-example gradients, by PyTorch

    def per_example(self, rows: slice) -> list[Tensor]:
        found = self._gradients(rows)
        return [self._weight_in_order(found[0], (len(found[0]),)), *found[1:]] if self.weight else found

    def _gradients(self, rows: slice) -> list[Tensor]:
        """Weight gradients as (b, O, -1), or (b, G, -1, O/G); their elements in the order of the patches."""
        found = []
        if self.weight:
            map_ = self.map[rows]
            b, channels = map_.shape[:2]
            field = self.field[rows]
            if self._plan.way == "rows":
                return [self._products_by_rows(map_, field), *self._bias_gradients(rows)]
            if self._plan.way == "convolution":
                product = self._weight_gradients(map_, field)
            else:
                with workspace.room(field, b * field.shape[1] * self.taps * self.pixels) as room:
                    product = self._product_with_patches(map_, field, room)
            shape = (self.groups, -1, channels // self.groups) if self._plan.outputs_last else (channels, -1)
            found.append(product.view(b, *shape))
        return found + self._bias_gradients(rows)

    def _bias_gradients(self, rows: slice) -> list[Tensor]:
        return [self.g[rows].flatten(2).sum(2)] if self.bias else []

    def _products_by_rows(self, map_: Tensor, field: Tensor) -> Tensor:
        """(b, KH, G, O/G, C/G KW), in memory (KH, b, ...): a batched product for every row of the kernel.

        What a row of the kernel sees above and below the field is zero, and left out.
        """
        b, c, high, wide = field.shape
        shape = patches_of_a_row(b, field.shape, map_.shape, self.kernel, self.groups)
        side = self.padding[1]
        columns, width = shape[2] * shape[3], shape[5]
        maps = map_.reshape(b * self.groups, map_.shape[1] // self.groups, self.pixels)
        sizes = (self.kernel[0], *maps.shape[:2], columns)
        found = workspace.take(1, math.prod(sizes)) if _is_plain(map_) else map_.new_empty(math.prod(sizes))
        found = found.view(sizes)
        with workspace.room(field, math.prod(shape)) as room:
            with workspace.room(field, b * c * high * (wide + 2 * side)) as padded:
                frame = padded.view(b, c, high, wide + 2 * side)
                if side:
                    padded.zero_()
                frame[..., side : side + wide] = field
                channel, line = frame.stride()[1:3]
                steps = (c * channel, c // self.groups * channel, channel, self.dilation[1], line, self.stride[1])
                room.view(shape).copy_(frame.as_strided(shape, steps, frame.storage_offset()))
            patches = room.view(maps.shape[0], columns, high * width)
            for row in range(self.kernel[0]):
                down = row * self.dilation[0] - self.padding[0]  # from a line of the map to the one it sees
                first, last = max(0, -down), min(map_.shape[2], high - down)
                if first >= last:
                    found[row].zero_()
                    continue
                seen = patches[:, :, (first + down) * width : (last + down) * width]
                torch.bmm(maps[:, :, first * width : last * width], seen.mT, out=found[row])
        return found.view(self.kernel[0], b, self.groups, maps.shape[1], columns).movedim(0, 1)

    def _done_with(self, grads: list[Tensor]) -> None:
        if self._plan.way == "rows" and self.weight and _is_plain(grads[0]):
            workspace.give_back(grads[0])

    def _product_with_patches(self, map_: Tensor, field: Tensor, room: Tensor) -> Tensor:
        """The gradients, by patches that are put into ``room``."""
        b, channels = map_.shape[:2]
        if self._plan.channels_inside:
            return torch.bmm(map_.reshape(b, channels, -1), self._patches_channels_inside(field, room))
        patches = self._patches(field, room).flatten(0, 1)  # (b G, C/G K, L)
        maps = map_.reshape(b * self.groups, channels // self.groups, -1)
        return patches @ maps.mT if self._plan.outputs_last else maps @ patches.mT

    def _weight_gradients(self, map_: Tensor, field: Tensor) -> Tensor:
        """(b O, C/G, *kernel), by PyTorch's own convolution: every example is a group of its own."""
        whole = map_.shape[1] // self.groups % VECTOR == 0 and field.shape[1] // self.groups % VECTOR == 0
        if not whole and len(map_) > 1:
            pairs = zip(map_.split(1), field.split(1), strict=True)
            return torch.cat([self._weight_gradients(m, f) for m, f in pairs])
        maps, fields = (t.reshape(1, -1, *t.shape[2:]) for t in (map_, field))
        return self._weight_gradient(maps, fields, len(map_) * self.groups)

    def _weight_gradient(self, map_: Tensor, field: Tensor, groups: int) -> Tensor:
        """The ordinary gradient, of all examples given together."""
        shape = (map_.shape[1], field.shape[1] // groups, *self.kernel)
        # Only the shape of the weight counts, but it would be copied if it were not contiguous.
        reused = _is_plain(map_)
        stand_in = workspace.take(1, math.prod(shape)) if reused else map_.new_empty(1)
        found: Tensor = torch.ops.aten.convolution_backward(
            map_,
            field,
            stand_in.view(shape) if reused else stand_in.expand(shape),
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.kernel),
            groups,
            (False, True, False),
        )[1]
        if reused:
            workspace.give_back(stand_in)
        return found

    def _in_order(self, sums: list[Tensor]) -> list[Tensor]:
        return [self._weight_in_order(sums[0], ()).contiguous(), *sums[1:]] if self.weight else sums

    def _weight_in_order(self, weight: Tensor, examples: tuple[int, ...]) -> Tensor:
        """(*examples, O, C/G, *kernel) from the order of the patches."""
        shape = (*examples, self.map.shape[1])
        if self._plan.way == "rows":  # (..., KH, G, O/G, C/G, KW)
            n, weight = len(examples), weight.unflatten(-1, (-1, self.kernel[1]))
            order = (*range(n), n + 1, n + 2, n + 3, n, n + 4)
            return weight.permute(order).reshape(*shape, weight.shape[-2], *self.kernel)
        if self._plan.outputs_last:
            return weight.mT.reshape(*shape, -1, *self.kernel)
        if self._plan.channels_inside:
            return weight.view(*shape, *self.kernel, -1).movedim(-1, len(shape))
        return weight.view(*shape, -1, *self.kernel)

    def _patches(self, x: Tensor, room: Tensor) -> Tensor:
        """(b, G, C/G K, L), from a strided view: one copy, and no launch per example (as F.unfold has on CUDA)."""
        if any(self.padding):
            x = F.pad(x, [p for width in reversed(self.padding) for p in (width, width)])
        x = x.contiguous()
        b, c = x.shape[:2]
        view = x.as_strided(
            (b, c, *self.kernel, *self.map.shape[2:]),
            (*x.stride()[:2], *self._steps(x.stride()[2:], self.dilation), *self._steps(x.stride()[2:], self.stride)),
        )
        return room.view(view.shape).copy_(view).view(b, self.groups, c // self.groups * self.taps, self.pixels)

    def _patches_channels_inside(self, x: Tensor, room: Tensor) -> Tensor:
        """(b, L, K C) of one group, from a view whose innermost runs are a row of the kernel with all its channels."""
        b, c = x.shape[:2]
        sizes = [n + 2 * p for n, p in zip(x.shape[2:], self.padding, strict=True)]
        inside = x.new_zeros((b, *sizes, c)) if any(self.padding) else x.new_empty((b, *sizes, c))
        window = inside
        for dim, (n, p) in enumerate(zip(x.shape[2:], self.padding, strict=True), start=1):
            window = window.narrow(dim, p, n)
        window.copy_(x.movedim(1, -1))
        strides = inside.stride()[1:-1]
        view = inside.as_strided(
            (b, *self.map.shape[2:], *self.kernel, c),
            (inside.stride()[0], *self._steps(strides, self.stride), *self._steps(strides, self.dilation), 1),
        )
        return room.view(view.shape).copy_(view).view(b, self.pixels, self.taps * c)

    @staticmethod
    def _steps(strides: Sequence[int], times: Sequence[int]) -> tuple[int, ...]:
        return tuple(s * t for s, t in zip(strides, times, strict=True))

    # ---- norms

    def take_gradients(self, rows: Tensor, biases: Tensor, norms: Tensor) -> None:
        """Every example's gradients, as the C++ kernel forms them, and the norms (float64) of the weight's."""
        geometry = self._geometry()
        if geometry is not None:  # otherwise they are of no use here
            self._buffer, self._norms = (rows, biases, geometry), norms

    def sq_norms(self) -> list[Tensor]:
        if self._buffer is not None:
            return self._buffered_squares()
        if self.formula == "gram":
            bias = [row_sq_norms(g) for g in self._bias_gradients(slice(None))]
            return [self._gram_sq_norms(), *bias]
        geometry = self._geometry()
        kernels = native.kernels() if geometry is not None else None
        if kernels is None or geometry is None:
            return super().sq_norms()
        if self.examples * geometry.size > performance.settings().kept(self.device):
            # Norms only: nothing is added to the sums of a bound of zero.
            norms = kernels.conv2d_clip(*self._lifted(), geometry, bias=False, bound=0.0).norms
            bias = [row_sq_norms(g) for g in self._bias_gradients(slice(None))]
            return [norms.square().float(), *bias]
        buffer = workspace.take(self.examples, geometry.size)
        biases, self._norms = kernels.conv2d_gradients(*self._lifted(), geometry, bias=self.bias, buffer=buffer)
        self._buffer, self._lent = (buffer, biases, geometry), True
        return self._buffered_squares()

    def _buffered_squares(self) -> list[Tensor]:
        assert self._buffer is not None
        return [self._norms.square().float()] + ([row_sq_norms(self._buffer[1])] if self.bias else [])

    def _gram_sq_norms(self) -> Tensor:
        """From products of pixels. They cancel: a bound on the rounding is added, so no norm is underestimated."""
        x, g = self.field, self.map.flatten(2)
        if any(self.padding):
            x = F.pad(x, [p for width in reversed(self.padding) for p in (width, width)])
        sizes, pixels = x.shape[2:], self.map.shape[2:]
        flat = x.flatten(2)
        of_places = torch.bmm(flat.mT, flat).view(-1, *sizes, *sizes)
        per_example, *strides = of_places.stride()
        rows, columns = strides[: len(sizes)], strides[len(sizes) :]
        steps = (per_example, *self._steps(rows, self.stride), *self._steps(columns, self.stride))
        # A tap of the kernel moves both pixels of a pair.
        both = self._steps([a + b for a, b in zip(rows, columns, strict=True)], self.dilation)
        xx = None
        for tap in itertools.product(*(range(k) for k in self.kernel)):
            offset = sum(self._steps(both, tap))
            part = of_places.as_strided((self.examples, *pixels, *pixels), steps, offset)
            xx = part.clone() if xx is None else xx.add_(part)
        assert xx is not None
        return gram_sq_norms(xx.view(self.examples, self.pixels, self.pixels), torch.bmm(g.mT, g))

    # ---- sums

    def keep(self, keep: Tensor) -> None:
        if self._buffer is None:
            super().keep(keep)
        else:
            self._dropped = ~keep

    def _drop(self, keep: Tensor) -> None:
        self.field, self.map = keep_rows(self.field, keep), keep_rows(self.map, keep)
        self.g = self.field if self.transposed else self.map

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if self._buffer is not None:
            return self._buffered_sums(weights)
        if self._cached or any(w is not weights[0] for w in weights[1:]) or not self.one_contraction:
            return super().weighted_sums(weights)
        w = weights[0].to(self.map.dtype).view(-1, *[1] * (self.map.dim() - 1))
        found = []
        if self.weight:
            found.append(self._weight_gradient(self.map * w, self.field, self.groups))
        if self.bias:
            found.append((self.g.flatten(2).sum(2) * weights[-1].to(self.g.dtype).view(-1, 1)).sum(0))
        return found

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        return self._clipped_by_norms(weigh) if self.formula == "gram" else super().clipped_sums(weigh)

    # ---- by the C++ kernel

    def _geometry(self) -> native.ConvGeometry | None:
        """None where the kernel does not take this convolution."""
        if self.transposed or not self.weight or len(self.kernel) > 2:
            return None
        if native.for_tensors(self.field, self.map) is None:
            return None
        lift = len(self.kernel) == 1  # one dimension is two, the first of them of size one
        return native.ConvGeometry(
            *self._lifted(),
            kernel=(1, *self.kernel) if lift else self.kernel,
            stride=(1, *self.stride) if lift else self.stride,
            padding=(0, *self.padding) if lift else self.padding,
            dilation=(1, *self.dilation) if lift else self.dilation,
            groups=self.groups,
        )

    def _lifted(self) -> tuple[Tensor, Tensor]:
        if len(self.kernel) == 1:
            return self.field.unsqueeze(2), self.map.unsqueeze(2)
        return self.field, self.map

    def clipped_at_once(self, bound: float) -> native.Clipped | None:
        geometry = self._geometry() if self.formula == "direct" else None
        kernels = native.kernels()
        if geometry is None or kernels is None:
            return None
        found = kernels.conv2d_clip(*self._lifted(), geometry, bias=self.bias, bound=bound)
        found.sums[0] = found.sums[0].view(self.map.shape[1], -1, *self.kernel)
        return found

    def _buffered_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        kernels = native.kernels()
        assert self._buffer is not None and kernels is not None
        buffer, biases, geometry = self._buffer
        self._buffer = None
        if self._dropped is not None:
            weights = [w.masked_fill(self._dropped, 0.0) for w in weights]
        found = [kernels.conv2d_weighted(buffer, geometry, weights[0]).view(self.map.shape[1], -1, *self.kernel)]
        if self._lent:
            workspace.give_back(buffer)
        return found + ([kernels.weighted_rows(biases, weights[-1])] if self.bias else [])
