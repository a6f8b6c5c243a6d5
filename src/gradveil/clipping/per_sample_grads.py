"""One use of a layer in one pass: what is known of its per-example gradients, and how to get at them.

Legend: B examples, P one parameter's shape, D inputs, O outputs, T positions, L output pixels,
G convolution groups. A use answers three questions about the gradients of its parameters:

    per_example(rows)     the gradients of these examples, each (b, *P)
    sq_norms()            squared norm per example, one (B,) per parameter
    weighted_sums(ws)     sum over examples of w_i times its gradient, one P per parameter

    clipped_sums(weigh)   both at once, for a use that holds whole groups by itself

Where the per-example gradient *is* the way to the sum (convolutions), clipping it on the way costs next
to nothing; a matrix's norms come first, from the factors of its rank-one gradients, and one scaled
contraction follows. Which of several formulas a layer uses is decided in its own file, by cost; the settings
behind that are in performance.py, and change nothing beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.clipping import performance
from gradveil.clipping.backends import native


def at_least_float32(t: Tensor) -> Tensor:
    """At least float32: norms are never accumulated in half precision."""
    return t if t.dtype in (torch.float32, torch.float64) or t.is_complex() else t.float()


def wide_pair(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both at least float32, and of one type."""
    x, g = at_least_float32(x), at_least_float32(g)
    if x.dtype != g.dtype:
        common = torch.promote_types(x.dtype, g.dtype)
        x, g = x.to(common), g.to(common)
    return x, g


def as_multiplied(x: Tensor, g: Tensor) -> Tensor:
    """The factor of a product, as autocast has rounded it where the result, and so its gradient, is a half."""
    return x.to(g.dtype) if g.dtype in HALVES and x.dtype not in HALVES else x


HALVES = (torch.bfloat16, torch.float16)


def keep_rows(t: Tensor, keep: Tensor) -> Tensor:
    """Zero the rows of examples that are dropped; multiplying by 0 would keep their NaN."""
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device))


def weights_of(norms: np.ndarray[Any, Any], bound: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """min(1, bound / norm) of every example, 0 where its norm is not finite; and which examples to keep (None: all).

    In numpy, whose calls cost a fraction of torch's: there is one number per example, and small layers feel each call.
    """
    bound = min(bound, 3e38)  # what is not finite in float32 bounds nothing
    weights = bound / np.maximum(norms, bound)  # nan where the norm is
    if not math.isnan(norms.dot(weights)):
        return weights, None
    np.nan_to_num(weights, copy=False, nan=0.0)  # some norm is infinite, or not a number
    return weights, np.isfinite(norms)


Weigh = Callable[[slice, list[Tensor]], tuple[list[Tensor], Tensor | None]]
"""From squared norms per parameter to a weight per example and parameter, and which examples to keep (None: all)."""


class PerSampleGrads:
    """The defaults go through :meth:`per_example` in chunks; layers override what they know better."""

    examples: int
    elements_per_example: int = 1
    device: torch.device
    keeps_gradients = True  # between norms and sums, where they fit; False: the sums have a shorter way
    _cached: list[list[Tensor]] | None = None  # per-example gradients, chunk by chunk

    def per_example(self, rows: slice) -> list[Tensor]:
        raise NotImplementedError

    def _gradients(self, rows: slice) -> list[Tensor]:
        """As :meth:`per_example`, each (b, ...) with its coordinates in any order, the same for all rows."""
        return self.per_example(rows)

    def _done_with(self, grads: list[Tensor]) -> None:
        """What :meth:`_gradients` gave has been used, and nobody holds on to it."""

    def _in_order(self, sums: list[Tensor]) -> list[Tensor]:
        """Sums of what :meth:`_gradients` gave, as the parameters have them."""
        return sums

    def keep(self, keep: Tensor) -> None:
        """Forget the gradients of the examples where ``keep`` is False."""
        if self._cached is None:
            self._drop(keep)
        else:
            masks = [keep[rows] for rows in self.chunks()]
            self._cached = [[keep_rows(g, m) for g in gs] for gs, m in zip(self._cached, masks, strict=True)]

    def _drop(self, keep: Tensor) -> None:
        raise NotImplementedError

    def chunks(self) -> list[slice]:
        most = max(1, performance.settings().chunk(self.device) // max(1, self.elements_per_example))
        count = -(-self.examples // most)
        return [slice(self.examples * i // count, self.examples * (i + 1) // count) for i in range(count)]

    def sq_norms(self) -> list[Tensor]:
        """Norms by way of the gradients; where they fit the cache they are kept for the sums that follow."""
        parts, kept = [], []
        for rows in self.chunks():
            grads = self._gradients(rows)
            parts.append([row_sq_norms(g) for g in grads])
            size = sum(g[0].numel() for g in grads)
            if self.keeps_gradients and self.examples * size <= performance.settings().kept(self.device):
                kept.append(grads)
            else:
                self._done_with(grads)
        self._cached = kept or None
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        def parts() -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
            cached = self._cached or (self._gradients(rows) for rows in self.chunks())
            for rows, grads in zip(self.chunks(), cached, strict=True):
                yield [w[rows] for w in weights], grads
                self._done_with(grads)

        return self._in_order(_weighted_sums(parts()))

    def clipped_at_once(self, bound: float) -> native.Clipped | None:
        """On the CPU, sums clipped to ``bound`` over all parameters together, by a kernel; None: no short way."""
        return None

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        """A few examples at a time: gradients, norms, weights, sum. The gradients are computed once."""

        def parts() -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
            for rows in self.chunks():
                grads = self._gradients(rows)
                weights, keep = weigh(rows, [row_sq_norms(g) for g in grads])
                yield weights, grads if keep is None else [keep_rows(g, keep) for g in grads]
                self._done_with(grads)

        return self._in_order(_weighted_sums(parts()))

    def _clipped_by_norms(self, weigh: Weigh) -> list[Tensor]:
        """Norms of the whole batch first, then one contraction."""
        weights, keep = weigh(slice(None), self.sq_norms())
        if keep is not None:
            self.keep(keep)
        return self.weighted_sums(weights)


_BLOCK = 1024  # elements that are added up in float32 before anything else: more of them would leave the margin


def row_sq_norms(g: Tensor) -> Tensor:
    """The squared norm of every row, in float32 or better."""
    g = at_least_float32(g)
    rows = _as_matrices(g, _lies_by_parts(g))
    kernels = native.for_tensors(rows) if rows.dim() == 2 else None
    if kernels is not None:
        return kernels.row_squares(rows).float()
    squares = squares_of_rows(rows)
    return squares if squares.dim() == 1 else squares.sum(0)


def squares_of_rows(rows: Tensor) -> Tensor:
    """The squared norms along the last dimension, by PyTorch: on the CPU a long row is added up in blocks."""
    size = rows.shape[-1]
    squares: Tensor
    if torch.is_grad_enabled() or not rows.is_cpu:
        squares = torch.linalg.vecdot(rows, rows)
        return squares
    if size <= _BLOCK:
        return norms_of_rows(rows).square_()
    inner = size // _BLOCK * _BLOCK
    blocks = rows[..., :inner].unflatten(-1, (-1, _BLOCK))
    squares = torch.linalg.vector_norm(blocks, dim=-1).square_().sum(-1)
    return squares if inner == size else squares.add_(squares_of_rows(rows[..., inner:]))


def norms_of_rows(rows: Tensor) -> Tensor:
    """Their square roots, on the CPU and where nothing is differentiated."""
    if rows.shape[-1] <= _BLOCK:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        return norms
    return squares_of_rows(rows).sqrt_()


def _lies_by_parts(g: Tensor) -> bool:
    """Whether gradients (b, parts, ...) lie in memory part by part, each with all examples."""
    return g.dim() > 2 and g.shape[1] > 1 and g.stride(1) >= g.stride(0) and g.numel() > 0


def _as_matrices(g: Tensor, by_parts: bool) -> Tensor:
    """(b, -1) of gradients, or (parts, b, -1): where they lie so, the first would be a copy."""
    if by_parts:
        return g.movedim(1, 0).flatten(2)
    return g.reshape(len(g), -1)  # a parameter may have no dimension at all


def gram_sq_norms(xx: Tensor, gg: Tensor) -> Tensor:
    """sum_st <x_s, x_t> <g_s, g_t> per example, from both (B, T, T).

    The sum cancels: its rounding error is bounded and added, so the norm is never underestimated. An example whose
    positions cancel to within rounding is clipped more than it need be.
    """
    total = torch.linalg.vecdot(xx.flatten(1).double(), gg.flatten(1).double())
    lengths = (xx.diagonal(dim1=1, dim2=2).clamp(min=0) * gg.diagonal(dim1=1, dim2=2).clamp(min=0)).sqrt().sum(1)
    margin = 4.0 * torch.finfo(xx.dtype).eps * lengths.double().square()
    safe: Tensor = (total.clamp(min=0) + margin).to(xx.dtype)
    return safe


def _weighted_sums(parts: Iterable[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Tensor]:
    """Of some examples after others, weights and gradients (b, ...) of each parameter: the weighted sums."""
    totals: list[Tensor] = []
    for weights, grads in parts:
        if not totals:
            shapes, by_parts = [g.shape[1:] for g in grads], [_lies_by_parts(g) for g in grads]
        rows = [_as_matrices(g, apart) for g, apart in zip(grads, by_parts, strict=True)]
        of_rows = [w.to(g.dtype).unsqueeze(0) for w, g in zip(weights, grads, strict=True)]
        if not totals:
            totals = [torch.matmul(w, g) for w, g in zip(of_rows, rows, strict=True)]
            continue
        for total, w, g in zip(totals, of_rows, rows, strict=True):
            if g.dim() == 2:
                total.addmm_(w, g)
            else:
                total.baddbmm_(w.expand(len(g), *w.shape), g)
    return [total.view(shape) for total, shape in zip(totals, shapes, strict=True)] if totals else []


class Workspace:
    """Large buffers that are used again in every step: fresh memory costs more to get than to fill."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, rows: int, columns: int) -> Tensor:
        """A float32 buffer (rows, columns) on the CPU, with anything in it."""
        size = rows * columns
        fitting = [b for b in self._free if size <= b.numel() <= 2 * size]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self._free = [b for b in self._free if b is not best]
        else:
            best = torch.empty(size)
        return best[:size].view(rows, columns)

    def give_back(self, buffer: Tensor) -> None:
        whole = buffer._base
        if whole is None:  # the buffer itself, or one taken where torch keeps no account of views
            whole = buffer.new_empty(0).set_(buffer.untyped_storage())
        room = performance.settings().kept_elements - sum(b.numel() for b in self._free)
        if whole.numel() <= room:
            self._free.append(whole)

    @contextmanager
    def room(self, like: Tensor, size: int) -> Iterator[Tensor]:
        """Room for ``size`` elements of the type of ``like``, on its device, for as long as the block lasts."""
        if not (like.is_cpu and like.dtype is torch.float32):
            yield like.new_empty(size)
            return
        buffer = self.take(1, size)
        try:
            yield buffer.view(-1)
        finally:
            self.give_back(buffer)

    def clear(self) -> None:
        self._free = []


workspace = Workspace()


class MaterializedGrads(PerSampleGrads):
    """Per-example gradients that are there already (from torch.func)."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.grads = grads
        self.examples = len(grads[0])
        self.device = grads[0].device
        self.elements_per_example = sum(g[0].numel() if len(g) else 1 for g in grads)

    def per_example(self, rows: slice) -> list[Tensor]:
        return [g[rows] for g in self.grads]

    def _drop(self, keep: Tensor) -> None:
        self.grads = [keep_rows(g, keep) for g in self.grads]


class CombinedGrads(PerSampleGrads):
    """The same parameters used several times in one pass: the gradient of an example is the *sum* of its uses."""

    def __init__(self, uses: Sequence[PerSampleGrads]) -> None:
        self.uses = list(uses)
        self.examples = uses[0].examples
        self.device = uses[0].device
        self.elements_per_example = max(u.elements_per_example for u in uses)

    def per_example(self, rows: slice) -> list[Tensor]:
        columns = zip(*(use.per_example(rows) for use in self.uses), strict=True)
        return [torch.stack(column).sum(0) for column in columns]

    def _drop(self, keep: Tensor) -> None:
        for use in self.uses:
            use.keep(keep)

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if self._cached:
            return super().weighted_sums(weights)
        columns = zip(*(use.weighted_sums(weights) for use in self.uses), strict=True)
        return [torch.stack(column).sum(0) for column in columns]


class WhitenedGrads(PerSampleGrads):
    """Another use's gradients g seen as (g - m) / b per coordinate; its sums are scaled back by b, not shifted."""

    def __init__(self, use: PerSampleGrads, centres: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
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

    def _drop(self, keep: Tensor) -> None:
        self.kept = keep

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [b * s for b, s in zip(self.scales, super().weighted_sums(weights), strict=True)]

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        return [b * s for b, s in zip(self.scales, super().clipped_sums(weigh), strict=True)]
