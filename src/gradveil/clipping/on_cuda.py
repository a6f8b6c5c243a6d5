"""Which uses the CUDA kernels take, and how: one launch or a few per layer, nothing read back.

A use that none of them takes goes through PyTorch (uses.py), with the same result up to rounding.
"""

from __future__ import annotations

from gradveil.clipping.rules.conv import ConvUse
from gradveil.clipping.rules.linear import LinearUse, TransposedLinearUse
from gradveil.clipping.uses import MaterialisedUse, Use
from gradveil.kernels import cuda, programs
from gradveil.kernels.cuda import Clip, Clipped


def clipped(use: Use, clip: Clip) -> Clipped | None:
    """Clipped sums of a use whose parameters are all in one group; None where no kernel fits."""
    found = _clipped(use, clip)
    recorder = programs.current()
    if found is not None and recorder is not None:
        recorder.finish(found.both, found.sums)
    return found


def _clipped(use: Use, clip: Clip) -> Clipped | None:
    if isinstance(use, LinearUse):
        return _linear(use, clip)
    if isinstance(use, ConvUse):
        return _convolution(use, clip)
    if isinstance(use, MaterialisedUse) and len(use.grads) <= 2:
        return cuda.clip_rows(use.grads, clip) if cuda.usable(*use.grads) else None
    return None


def _linear(use: LinearUse, clip: Clip) -> Clipped | None:
    if not cuda.usable(use.x, use.g):
        return None
    if use.positions == 1:
        found = cuda.clip_rank_one(use.x, use.g, clip, weight=use.weight, bias=use.bias)
    elif use.formula != "direct":
        found = cuda.clip_gram(use.x, use.g, clip, weight=use.weight, bias=use.bias)
    else:
        return None
    if isinstance(use, TransposedLinearUse) and use.weight:
        found.sums[0] = found.sums[0].mT.contiguous()
    return found


def _convolution(use: ConvUse, clip: Clip) -> Clipped | None:
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
