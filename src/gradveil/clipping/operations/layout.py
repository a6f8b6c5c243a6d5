"""Where the examples of a batch stand in a tensor.

Legend: B examples, n the size of one dimension. Models fold the batch into other dimensions (windows, heads, video
frames), or put it behind the sequence; along that dimension the examples are

    row r belongs to example (r // inner) % B,   n = outer * B * inner

A batch that comes first and is not folded has dim = 0 and inner = outer = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.clipping.validation.row_differences import tolerance

UNSEEN = -1  # ``inner`` of a fold whose rows do not change with an example


@dataclass(frozen=True)
class Layout:
    """``inner`` None: all of the fold is inside (outer = 1), however large it is.

    ``fold``: n / B, where the examples are in the middle of it (outer > 1 and inner > 1): of another size it could not
    be told which of the two has changed.
    """

    dim: int = 0
    inner: int | None = None
    fold: int | None = None

    def split(self, n: int, batch: int) -> tuple[int, int, int] | None:
        """(outer, B, inner) of a dimension of size n; None where it does not come out even."""
        inner = self.inner if self.inner is not None else n // batch
        if inner == 0 or n % (batch * inner) or (self.fold is not None and n != self.fold * batch):
            return None
        return n // (batch * inner), batch, inner

    def front(self, t: Tensor, batch: int) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """The tensor with the examples first, (B, ...), and what undoes that on a tensor with the same dimensions.

        None where the tensor has not the size that the layout asks for.
        """
        dim = self.dim
        sizes = self.split(t.shape[dim], batch) if t.dim() > dim else None
        if sizes is None:
            return None
        outer, _, inner = sizes
        if outer == inner == 1:
            if dim == 0:
                return t, _same
            return t.movedim(dim, 0), lambda out: out.movedim(0, dim).contiguous()
        if outer == 1:
            kept = t.unflatten(dim, (batch, inner))
            return kept.movedim(dim, 0), lambda out: out.movedim(0, dim).flatten(dim, dim + 1)
        kept = t.unflatten(dim, (outer, batch, inner))
        return kept.movedim(dim + 1, 0), lambda out: out.movedim(0, dim + 1).flatten(dim, dim + 2)

    def spread(self, copies: Tensor, size: int) -> Tensor | None:
        """(pre, B, post) with the examples at ``dim``, repeated to (pre, size, post) as this layout has them."""
        batch = copies.shape[self.dim]
        sizes = self.split(size, batch)
        if sizes is None or sizes == (1, batch, 1):
            return copies if sizes is not None else None
        apart = copies.unsqueeze(self.dim).unsqueeze(self.dim + 2)
        shape = [*copies.shape[: self.dim], *sizes, *copies.shape[self.dim + 1 :]]
        return apart.expand(shape).flatten(self.dim, self.dim + 2)


def _same(out: Tensor) -> Tensor:
    return out


class NoLayout(Exception):
    """It cannot be told which part of a tensor belongs to which example."""


def find(a: Tensor, b: Tensor, changed: Tensor | None, sizes: tuple[int, int], example: int) -> Layout | None:
    """From a tensor in batches of two sizes, and in the first with one example changed; None: no batch in it.

    ``changed`` may be missing, or the same as ``a``: then a fold is UNSEEN.
    """
    if a.dim() != b.dim():
        raise NoLayout("its number of dimensions changes with the size of the batch")
    dims = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    if not dims:
        return None
    first, second = sizes
    if len(dims) > 1:  # the longest sequence of a batch may change with it too
        dims = [d for d in dims if a.shape[d] * second == b.shape[d] * first and a.shape[d] % first == 0]
    if len(dims) != 1:
        raise NoLayout("several of its dimensions change with the size of the batch")
    dim = dims[0]
    fold = a.shape[dim] // first
    if a.shape[dim] != fold * first or b.shape[dim] != fold * second:
        raise NoLayout("the number of its rows follows from the examples themselves (routing, packing or filtering)")
    if fold == 1:
        return Layout(dim, 1)
    rows = changed_rows(a, changed, dim)
    if not rows:
        return Layout(dim, UNSEEN)
    for inner in [fold] + [k for k in range(fold - 1, 0, -1) if fold % k == 0]:
        if all((row // inner) % first == example for row in rows):
            return Layout(dim, None if inner == fold else inner, fold if 1 < inner < fold else None)
    raise NoLayout("several of its rows change with one example")


def settled(layouts: Sequence[Layout | None], sizes: Sequence[tuple[int, ...]]) -> tuple[Layout | None, ...]:
    """What is unseen is taken from another tensor of the operation with as many rows; or to be inside, as reshape and
    flatten have it. (That an example's norms do not depend on the others is looked at afterwards, on the same batch.)
    """
    seen = {
        size[layout.dim]: (layout.inner, layout.fold)
        for layout, size in zip(layouts, sizes, strict=True)
        if layout is not None and layout.inner != UNSEEN
    }
    return tuple(
        Layout(layout.dim, *seen.get(size[layout.dim], (None, None)))
        if layout is not None and layout.inner == UNSEEN
        else layout
        for layout, size in zip(layouts, sizes, strict=True)
    )


def changed_rows(a: Tensor, b: Tensor | None, dim: int) -> list[int]:
    """Which rows along a dimension differ between two tensors by more than rounding.

    (Products of other sizes round otherwise: an expert gets more or fewer rows when an example is another one.)
    """
    if b is None or a.shape != b.shape or not a.numel():
        return []
    differ = (a != b) & ~((a != a) & (b != b))
    if a.is_floating_point() or a.is_complex():
        least = tolerance(a) * a.abs().nan_to_num(0.0, 0.0, 0.0).max()
        differ &= ~((a - b).abs() <= least)
    rows = differ.movedim(dim, 0).flatten(1).any(1) if a.dim() > 1 else differ
    found: list[int] = torch.nonzero(rows).flatten().tolist()
    return found
