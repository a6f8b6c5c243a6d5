"""Which uses the CUDA kernels take, and how: one launch or a few per layer, nothing read back.

A use that none of them takes goes through PyTorch (per_sample_grads.py), with the same result up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.clipping.backends import cuda, programs
from gradveil.clipping.backends.cuda import Clip, Clipped
from gradveil.clipping.per_sample_grads import MaterializedGrads, PerSampleGrads
from gradveil.clipping.rules.conv_use import ConvGrads
from gradveil.clipping.rules.embedding import EmbeddingGrads
from gradveil.clipping.rules.linear import LinearGrads, TransposedLinearGrads
from gradveil.clipping.tied_weights import TiedGrads


def clipped(use: PerSampleGrads, clip: Clip) -> Clipped | None:
    """Clipped sums of a use whose parameters are all in one group; None where no kernel fits."""
    if isinstance(use, TiedGrads):
        return _tied(use, clip)
    found = _clipped(use, clip)
    recorder = programs.current()
    if found is not None and recorder is not None:
        recorder.finish(found.both, found.sums)
    return found


_ALIGNED = 8  # halves: 16 bytes


def _half_linear(use: LinearGrads, clip: Clip) -> Clipped:
    outputs = use.g.shape[-1]
    more = 0 if isinstance(use, TransposedLinearGrads) else -outputs % _ALIGNED
    found = cuda.clip_in_chunks(lambda rows: use.half_gradients(rows, more), use.chunks(), clip)
    if more:
        found.sums[0] = found.sums[0][:outputs]
    return found


def _tied(use: TiedGrads, clip: Clip) -> Clipped | None:
    """An output layer in half precision, and embeddings that share its weight and are added to its gradients."""
    linear = next((u for u in use.uses if isinstance(u, LinearGrads)), None)
    rows_of = [u for u in use.uses if isinstance(u, EmbeddingGrads)]
    if (
        linear is None
        or isinstance(linear, TransposedLinearGrads)
        or not linear.half
        or len(use.shapes) != 1
        or len(rows_of) != len(use.uses) - 1
        or not cuda.usable(linear.x, linear.g, *(u.g for u in rows_of))
    ):
        return None
    outputs, inputs = use.shapes[0]
    more = -outputs % _ALIGNED

    def gradients(rows: slice) -> list[Tensor]:
        found = linear.half_gradients(rows, more)
        table = found[0].view(-1, inputs)  # (examples * rows of the weight, D)
        starts = torch.arange(0, len(table), outputs + more, device=table.device).unsqueeze(1)
        for other in rows_of:
            table.index_add_(0, (other.x[rows] + starts).flatten(), other.g[rows].flatten(0, 1).to(table.dtype))
        return found

    found = cuda.clip_in_chunks(gradients, linear.chunks(), clip)
    found.sums[0] = found.sums[0][:outputs]
    return found


def _clipped(use: PerSampleGrads, clip: Clip) -> Clipped | None:
    if isinstance(use, LinearGrads):
        return _linear(use, clip)
    if isinstance(use, ConvGrads):
        return _convolution(use, clip)
    if isinstance(use, MaterializedGrads) and len(use.grads) <= 2:
        return cuda.clip_rows(use.grads, clip) if cuda.usable(*use.grads) else None
    return None


def _linear(use: LinearGrads, clip: Clip) -> Clipped | None:
    if not cuda.usable(use.x, use.g):
        return None
    if use.half:
        return _half_linear(use, clip)
    if use.positions == 1:
        found = cuda.clip_rank_one(use.x, use.g, clip, weight=use.weight, bias=use.bias)
    elif use.formula != "direct":
        found = cuda.clip_gram(use.x, use.g, clip, weight=use.weight, bias=use.bias)
    else:
        return None
    if isinstance(use, TransposedLinearGrads) and use.weight:
        found.sums[0] = found.sums[0].mT.contiguous()
    return found


def _convolution(use: ConvGrads, clip: Clip) -> Clipped | None:
    if use.transposed or not use.weight or len(use.kernel) > 2 or not cuda.usable(use.field, use.map):
        return None
    lift = len(use.kernel) == 1  # one dimension is two, the first of them of size one
    found = cuda.clip_convolution(
        use.field.unsqueeze(2) if lift else use.field,
        use.map.unsqueeze(2) if lift else use.map,
        clip,
        kernel=(1, *use.kernel) if lift else use.kernel,
        stride=(1, *use.stride) if lift else use.stride,
        padding=(0, *use.padding) if lift else use.padding,
        dilation=(1, *use.dilation) if lift else use.dilation,
        groups=use.groups,
        bias=use.bias,
    )
    if lift:
        found.sums[0] = found.sums[0].squeeze(2)
    return found
