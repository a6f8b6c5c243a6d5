"""Which uses the CUDA kernels take, and how: one launch or a few per layer, nothing read back.

A use that none of them takes goes through PyTorch (uses.py), with the same result up to rounding.
"""

from __future__ import annotations

import torch

from gradveil.clipping.rules.conv import ConvUse
from gradveil.clipping.rules.linear import LinearUse, _Transposed
from gradveil.clipping.uses import MaterialisedUse, Use
from gradveil.kernels import cuda
from gradveil.kernels.cuda import Clip, Clipped


def clipped(use: Use, clip: Clip) -> Clipped | None:
    """Clipped sums of a use whose parameters are all in one group; None where no kernel fits."""
    if isinstance(use, LinearUse):
        return _linear(use, clip)
    if isinstance(use, ConvUse):
        return _convolution(use, clip)
    if isinstance(use, MaterialisedUse) and len(use.grads) <= 2:
        return cuda.clip_rows(use.grads, clip) if _single(*use.grads) else None
    return None


def _single(*tensors: torch.Tensor) -> bool:
    return all(t.is_cuda and t.dtype != torch.float64 and t.numel() > 0 for t in tensors)


def _linear(use: LinearUse, clip: Clip) -> Clipped | None:
    if not _single(use.x_BTD, use.g_BTO):
        return None
    if use.x_BTD.shape[1] == 1:
        found = cuda.clip_rank_one(use.x_BTD[:, 0], use.g_BTO[:, 0], clip, weight=use.weight, bias=use.bias)
    elif use.formula != "direct":
        found = cuda.clip_gram(use.x_BTD, use.g_BTO, clip, weight=use.weight, bias=use.bias)
    else:
        return None
    if isinstance(use, _Transposed) and use.weight:
        found.sums[0] = found.sums[0].mT.contiguous()
    return found


def _convolution(use: ConvUse, clip: Clip) -> Clipped | None:
    if use.transposed or not use.weight or len(use.kernel) > 2 or not _single(use.field, use.map):
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
