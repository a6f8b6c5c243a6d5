"""Several views of one example (augmentations of an image, say), averaged before they are clipped.

Legend: N examples, K views of each, in N K rows: row i K + k is view k of example i. The output gradient of every row
is 1/K of that of its own loss, so an example's gradient is the sum over its rows: the mean over its views (De et al.
2022, https://arxiv.org/abs/2204.13650). It is clipped once; the sensitivity is that of one example, whatever K.

A use of N K rows becomes one of N examples, by a form of the same kind where there is one:

    linear       K views of T positions are K T positions
    embedding    K views of T tokens are K T tokens
    convolution  K images are one image, stacked in the first direction with room for the padding between them
    formed       gradients that are there already are added up

so that norms and sums take the ways, and the kernels, they always take. Others go through :class:`ViewedGrads`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.clipping.per_sample_grads import MaterializedGrads, PerSampleGrads
from gradveil.clipping.rules.conv_use import ConvGrads
from gradveil.clipping.rules.embedding import EmbeddingGrads
from gradveil.clipping.rules.linear import LinearGrads


def of_examples(use: PerSampleGrads, views: int) -> PerSampleGrads:
    """The use of N K rows, each a view, as one of N examples."""
    if views == 1:
        return use
    if isinstance(use, LinearGrads):
        x, g = (_joined(t, views).flatten(1, -2) for t in (use.x, use.g))
        return type(use)(x, g, weight=use.weight, bias=use.bias)
    if isinstance(use, EmbeddingGrads):
        return EmbeddingGrads(_joined(use.x, views).flatten(1), _joined(use.g, views).flatten(1, 2), use.shape)
    if type(use) is ConvGrads:
        return _stacked_convolution(use, views)
    if isinstance(use, MaterializedGrads):
        return MaterializedGrads([_joined(g, views).sum(1) for g in use.grads])
    return ViewedGrads(use, views)


def _joined(t: Tensor, views: int) -> Tensor:
    """(N, K, ...) from rows."""
    return t.reshape(len(t) // views, views, *t.shape[1:])


def _stacked_convolution(use: ConvGrads, views: int) -> ConvGrads:
    """K fields one below the other, far enough apart that no patch of one reaches into the next.

    A map's rows are ``stride`` rows of its field apart, so the fields lie a multiple of it apart; the maps have zeros
    in the rows between, where patches would cut into two fields.
    """
    stride, padding = use.stride[0], use.padding[0]
    height, rows = use.field.shape[2], use.map.shape[2]
    pitch = max(-(-(height + padding) // stride), rows)  # in rows of the map
    field, map_ = _stacked(use.field, views, pitch * stride), _stacked(use.map, views, pitch)
    return ConvGrads(
        field,
        map_,
        field if use.transposed else map_,
        weight=use.weight,
        bias=use.bias,
        kernel=use.kernel,
        stride=use.stride,
        padding=use.padding,
        dilation=use.dilation,
        groups=use.groups,
        transposed=use.transposed,
        one_contraction=use.one_contraction,
    )


def _stacked(t: Tensor, views: int, pitch: int) -> Tensor:
    """(N, C, (K - 1) pitch + H, ...) from rows (N K, C, H, ...)."""
    apart = _joined(t, views)
    height = t.shape[2]
    out = t.new_zeros((len(apart), t.shape[1], (views - 1) * pitch + height, *t.shape[3:]))
    for k in range(views):
        out[:, :, k * pitch : k * pitch + height] = apart[:, k]
    return out


class ViewedGrads(PerSampleGrads):
    """Any use of rows: the gradient of an example is the sum over its rows."""

    keeps_gradients = False

    def __init__(self, use: PerSampleGrads, views: int) -> None:
        self.use, self.views = use, views
        self.examples, self.device = use.examples // views, use.device
        self.elements_per_example = use.elements_per_example * views

    def per_example(self, rows: slice) -> list[Tensor]:
        start, stop, _ = rows.indices(self.examples)
        found = self.use.per_example(slice(start * self.views, stop * self.views))
        return [_joined(g, self.views).sum(1) for g in found]

    def _drop(self, keep: Tensor) -> None:
        self.use.keep(keep.repeat_interleave(self.views))

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        of_rows: dict[int, Tensor] = {}  # uses look whether the weights of their parameters are the same tensor
        for w in weights:
            of_rows.setdefault(id(w), torch.repeat_interleave(w, self.views))
        return self.use.weighted_sums([of_rows[id(w)] for w in weights])
