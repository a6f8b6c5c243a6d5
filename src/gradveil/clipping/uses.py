"""One use of a layer in one pass: what is known of its per-example gradients, and how to get at them.

Legend: B examples, P one parameter's shape, D inputs, O outputs, T positions, L output pixels,
G convolution groups. A use answers three questions about the gradients of its parameters:

    per_example(rows)     the gradients of these examples, each (b, *P)
    sq_norms()            squared norm per example, one (B,) per parameter
    weighted_sums(ws)     sum over examples of w_i times its gradient, one P per parameter

    clipped_sums(weigh)   both at once, for a use that holds whole groups by itself

Where the per-example gradient *is* the way to the sum (convolutions), clipping it on the way costs next
to nothing; a matrix's norms come first, from the factors of its rank-one gradients, and one scaled
contraction follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

# Elements of per-example work held at a time: small enough for a CPU's cache, large enough for a GPU's width.
_CPU_CHUNK_ELEMENTS = 1 << 19
_CUDA_CHUNK_ELEMENTS = 1 << 28


def wide(t: Tensor) -> Tensor:
    """At least float32: norms are never accumulated in half precision."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def keep_rows(t: Tensor, keep: Tensor) -> Tensor:
    """Zero the rows of examples that are dropped; multiplying by 0 would keep their NaN."""
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device))


Weigh = Callable[[slice, list[Tensor]], tuple[list[Tensor], Tensor | None]]
"""From squared norms per parameter to a weight per example and parameter, and which examples to keep (None: all)."""


class Use:
    """The defaults go through :meth:`per_example` in chunks; layers override what they know better."""

    examples: int
    elements_per_example: int = 1
    device: torch.device

    def per_example(self, rows: slice) -> list[Tensor]:
        raise NotImplementedError

    def keep(self, keep: Tensor) -> None:
        """Forget the gradients of the examples where ``keep`` is False."""
        raise NotImplementedError

    def chunks(self) -> list[slice]:
        budget = _CUDA_CHUNK_ELEMENTS if self.device.type == "cuda" else _CPU_CHUNK_ELEMENTS
        size = max(1, budget // max(1, self.elements_per_example))
        return [slice(i, min(i + size, self.examples)) for i in range(0, self.examples, size)]

    def sq_norms(self) -> list[Tensor]:
        parts = [[_row_sq_norms(g) for g in self.per_example(rows)] for rows in self.chunks()]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return _add_up(_weighted([w[rows] for w in weights], self.per_example(rows)) for rows in self.chunks())

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        """A few examples at a time: gradients, norms, weights, sum. The gradients are computed once."""

        def part(rows: slice) -> list[Tensor]:
            grads = self.per_example(rows)
            weights, keep = weigh(rows, [_row_sq_norms(g) for g in grads])
            if keep is not None:
                grads = [keep_rows(g, keep) for g in grads]
            return _weighted(weights, grads)

        return _add_up(part(rows) for rows in self.chunks())


def _row_sq_norms(g: Tensor) -> Tensor:
    flat = wide(g).flatten(1)
    squares: Tensor = torch.linalg.vecdot(flat, flat)
    return squares


def _weighted(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    return [torch.tensordot(w.to(g.dtype), g, dims=1) for w, g in zip(weights, grads, strict=True)]


def _add_up(parts: Iterable[list[Tensor]]) -> list[Tensor]:
    totals: list[Tensor] = []
    for part in parts:
        totals = [t.add_(p) for t, p in zip(totals, part, strict=True)] if totals else part
    return totals


class MaterialisedUse(Use):
    """Per-example gradients that are there already (from torch.func)."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.grads = grads
        self.examples = len(grads[0])
        self.device = grads[0].device
        self.elements_per_example = sum(g[0].numel() if len(g) else 1 for g in grads)

    def per_example(self, rows: slice) -> list[Tensor]:
        return [g[rows] for g in self.grads]

    def keep(self, keep: Tensor) -> None:
        self.grads = [keep_rows(g, keep) for g in self.grads]


class CombinedUse(Use):
    """The same parameters used several times in one pass: the gradient of an example is the *sum* of its uses."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self.uses = list(uses)
        self.examples = uses[0].examples
        self.device = uses[0].device
        self.elements_per_example = max(u.elements_per_example for u in uses)

    def per_example(self, rows: slice) -> list[Tensor]:
        columns = zip(*(use.per_example(rows) for use in self.uses), strict=True)
        return [torch.stack(column).sum(0) for column in columns]

    def keep(self, keep: Tensor) -> None:
        for use in self.uses:
            use.keep(keep)

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        columns = zip(*(use.weighted_sums(weights) for use in self.uses), strict=True)
        return [torch.stack(column).sum(0) for column in columns]


class WhitenedUse(Use):
    """Another use's gradients g seen as (g - m) / b per coordinate; its sums are scaled back by b, not shifted."""

    def __init__(self, use: Use, centres: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        self.use, self.centres, self.scales = use, centres, scales
        self.examples, self.device, self.elements_per_example = (
            use.examples,
            use.device,
            use.elements_per_example,
        )
        self.kept: Tensor | None = None

    def per_example(self, rows: slice) -> list[Tensor]:
        grads = [(g - m) / b for g, m, b in zip(self.use.per_example(rows), self.centres, self.scales, strict=True)]
        return grads if self.kept is None else [keep_rows(g, self.kept[rows]) for g in grads]

    def keep(self, keep: Tensor) -> None:
        self.kept = keep

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [b * s for b, s in zip(self.scales, super().weighted_sums(weights), strict=True)]

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        return [b * s for b, s in zip(self.scales, super().clipped_sums(weigh), strict=True)]


class LinearUse(Use):
    """y = x W^T + b on (B, D) or (B, ..., D); parameters: weight (O, D) and bias (O), those that train."""

    def __init__(self, x: Tensor, g: Tensor, *, weight: bool, bias: bool) -> None:
        self.examples, self.device = x.shape[0], x.device
        self.weight, self.bias = weight, bias
        self.positions = math.prod(x.shape[1:-1])
        # (B, T, .), T = 1 for plain matrices
        self.x_BTD = wide(x).reshape(self.examples, self.positions, x.shape[-1])
        self.g_BTO = wide(g).reshape(self.examples, self.positions, g.shape[-1])
        if self.x_BTD.dtype != self.g_BTO.dtype:
            common = torch.promote_types(self.x_BTD.dtype, self.g_BTO.dtype)
            self.x_BTD, self.g_BTO = self.x_BTD.to(common), self.g_BTO.to(common)
        self.elements_per_example = x.shape[-1] * g.shape[-1]
        self.rank_one = self.positions == 1 or not weight  # norms without the gradients themselves

    def keep(self, keep: Tensor) -> None:
        self.x_BTD, self.g_BTO = keep_rows(self.x_BTD, keep), keep_rows(self.g_BTO, keep)

    def per_example(self, rows: slice) -> list[Tensor]:
        x, g = self.x_BTD[rows], self.g_BTO[rows]
        found = [torch.bmm(g.mT, x)] if self.weight else []
        return found + ([g.sum(1)] if self.bias else [])

    def sq_norms(self) -> list[Tensor]:
        if not self.rank_one:
            return super().sq_norms()
        g_BO = self.g_BTO.sum(1)  # T = 1, or only the bias trains
        g_sq = torch.linalg.vecdot(g_BO, g_BO)
        found = []
        if self.weight:  # the gradient of one example is the outer product g x^T: its norm is |g| |x|
            x_BD = self.x_BTD[:, 0]
            found.append(torch.linalg.vecdot(x_BD, x_BD) * g_sq)
        return found + ([g_sq] if self.bias else [])

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        scaled: dict[int, Tensor] = {}
        for w in weights:
            if id(w) not in scaled:
                scaled[id(w)] = self.g_BTO * w.to(self.g_BTO.dtype).view(-1, 1, 1)
        found = []
        if self.weight:
            found.append(scaled[id(weights[0])].flatten(0, 1).mT @ self.x_BTD.flatten(0, 1))
        return found + ([scaled[id(weights[-1])].sum((0, 1))] if self.bias else [])

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        if not self.rank_one:
            return super().clipped_sums(weigh)
        weights, keep = weigh(slice(None), self.sq_norms())
        if keep is not None:
            self.keep(keep)
        return self.weighted_sums(weights)


class Conv2dUse(Use):
    """Zero-padded cross-correlation; parameters: weight (O, C/G, kh, kw) and bias (O), those that train."""

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        *,
        weight: bool,
        bias: bool,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> None:
        self.examples, self.device = x.shape[0], x.device
        self.weight, self.bias = weight, bias
        self.x_BCHW, self.g_BOHW = wide(x), wide(g)
        if self.x_BCHW.dtype != self.g_BOHW.dtype:
            common = torch.promote_types(self.x_BCHW.dtype, self.g_BOHW.dtype)
            self.x_BCHW, self.g_BOHW = self.x_BCHW.to(common), self.g_BOHW.to(common)
        self.kernel, self.stride, self.padding, self.dilation, self.groups = (
            kernel,
            stride,
            padding,
            dilation,
            groups,
        )
        pixels = g.shape[2] * g.shape[3]
        self.elements_per_example = x.shape[1] * kernel[0] * kernel[1] * max(pixels, g.shape[1] // groups)

    def keep(self, keep: Tensor) -> None:
        self.x_BCHW, self.g_BOHW = keep_rows(self.x_BCHW, keep), keep_rows(self.g_BOHW, keep)

    def per_example(self, rows: slice) -> list[Tensor]:
        g = self.g_BOHW[rows]
        b, o, oh, ow = g.shape
        found = []
        if self.weight:
            patches = self._patches(self.x_BCHW[rows], oh, ow)  # (b, G, C/G kh kw, L)
            per_group = g.reshape(b * self.groups, o // self.groups, oh * ow) @ patches.flatten(0, 1).mT
            found.append(per_group.reshape(b, o, -1, *self.kernel))
        return found + ([g.sum((2, 3))] if self.bias else [])

    def _patches(self, x: Tensor, oh: int, ow: int) -> Tensor:
        """im2col from a strided view: one copy, no kernel launch per example (as F.unfold has on CUDA)."""
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = self.kernel, self.stride, self.padding, self.dilation
        x = F.pad(x, (pw, pw, ph, ph)) if ph or pw else x
        x = x.contiguous()
        b, c, _, _ = x.shape
        s0, s1, s2, s3 = x.stride()
        view = x.as_strided((b, c, kh, kw, oh, ow), (s0, s1, s2 * dh, s3 * dw, s2 * sh, s3 * sw))
        return view.reshape(b, self.groups, c // self.groups * kh * kw, oh * ow)

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if any(w is not weights[0] for w in weights[1:]):
            return super().weighted_sums(weights)
        scaled = self.g_BOHW * weights[0].to(self.g_BOHW.dtype).view(-1, 1, 1, 1)
        found = []
        if self.weight:
            shape = (scaled.shape[1], self.x_BCHW.shape[1] // self.groups, *self.kernel)
            found.append(
                conv2d_weight(self.x_BCHW, shape, scaled, self.stride, self.padding, self.dilation, self.groups)
            )
        return found + ([scaled.sum((0, 2, 3))] if self.bias else [])
