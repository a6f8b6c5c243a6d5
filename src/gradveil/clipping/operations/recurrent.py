"""All steps of a recurrent layer as one use of its weight.

What the hidden states add to the steps, h W^T + b, is added to what the inputs add. Its gradient is therefore that of
the sum, at every step. A tensor that holds b at every step, and so changes nothing but for that, receives it: of one
use with all steps as its positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradveil.clipping.backward_pass import Call
from gradveil.clipping.rules.linear import LinearGrads
from gradveil.clipping.validation.surroundings import no_autocast

if TYPE_CHECKING:
    from gradveil.clipping.clipper import Clipper


class RecurrentFunction(torch.autograd.Function):
    """b at every step; its gradient, with the hidden states that ``fed`` holds by then, is the use of W and b."""

    @staticmethod
    def forward(
        ctx: Any,
        clipper: Clipper,
        call: Call,
        fed: list[Tensor],
        time: int,
        backwards: bool,
        like: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.clipper, ctx.call, ctx.fed, ctx.time, ctx.backwards = clipper, call, fed, time, backwards
        ctx.bias = bias is not None
        value = like.new_zeros(()) if bias is None else bias.detach().to(like.dtype)
        return value.expand(like.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        h = torch.stack(ctx.fed[::-1] if ctx.backwards else ctx.fed, ctx.time)
        if ctx.time == 0:
            h, g = h.transpose(0, 1), g.transpose(0, 1)
        with no_autocast():
            ctx.clipper.collect(ctx.call, LinearGrads(h, g, weight=True, bias=ctx.bias), ctx.next_functions[1:])
        return (None,) * 8
