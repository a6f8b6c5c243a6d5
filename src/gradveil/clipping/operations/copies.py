"""One copy of a parameter for each example: the gradient of the copies is what each example adds.

In an operation that broadcasts (x + position, scale * x, a class token that is expanded to the batch) autograd itself
keeps the copies' gradients apart. A copy takes no memory: it is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from gradveil.clipping.backward_pass import Call
from gradveil.clipping.operations.layout import Layout
from gradveil.clipping.operations.plan import Site
from gradveil.clipping.operations.routing import Owners
from gradveil.clipping.operations.sources import Source
from gradveil.clipping.per_sample_grads import MaterializedGrads, at_least_float32
from gradveil.clipping.validation.surroundings import no_autocast

if TYPE_CHECKING:
    from gradveil.clipping.operations.tracking import Tracking


class CopyFunction(torch.autograd.Function):
    """From a parameter to its copies, (B, ...)."""

    @staticmethod
    def forward(ctx: Any, clipper: Any, call: Call, parameter: Tensor, rows: int) -> Tensor:
        ctx.clipper, ctx.call = clipper, call
        return parameter.detach().unsqueeze(0).expand(rows, *parameter.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        with no_autocast():
            ctx.clipper.collect(ctx.call, MaterializedGrads([at_least_float32(g)]), ctx.next_functions)
        return None, None, None, None


def take(tracking: Tracking, source: Source) -> Tensor:
    """The copies of a tracked tensor in this pass."""
    found = tracking.copied.get(id(source))
    if found is None:
        unit = tracking.clipper.units.of_operation("copies", [source], way="copies")
        call = Call(unit, tracking.current, again=tracking.again, sources=[source])
        found = tracking.copied[id(source)] = CopyFunction.apply(
            tracking.clipper, call, source.given(), tracking.current.rows
        )
    return found


def broadcast(
    tracking: Tracking,
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    site: Site,
    others: Sequence[Tensor],
    *,
    least: int,
) -> Any:
    """The operation on copies. NotImplemented: the batch is among its last ``least - 1`` dimensions, or in several."""
    align: Callable[[Tensor], Tensor] | None
    if tracking.current.rows == 1:
        align = _only
    else:
        align = _aligned_with(func, args, site, others, tracking.current.rows, least)
    return NotImplemented if align is None else _with_copies(tracking, func, args, kwargs, align)


class _DoesNotFit(Exception):
    pass


def _only(copies: Tensor) -> Tensor:
    return copies.squeeze(0)


def _aligned_with(
    func: Any, args: Any, site: Site, others: Sequence[Tensor], rows: int, least: int
) -> Callable[[Tensor], Tensor] | None:
    if getattr(func, "__name__", "") == "__setitem__":
        target = args[0][args[1]]
        pairs = [(site.out, target)]
    else:
        pairs = [(layout, t) for layout, t in zip(site.layouts, others, strict=False)]
    places = {
        (layout.dim - t.dim(), layout.split(t.shape[layout.dim], rows), t.shape[layout.dim])
        for layout, t in pairs
        if layout is not None and t.dim() > layout.dim
    }
    if len(places) != 1:
        return None
    (from_right, sizes, size) = next(iter(places))
    if sizes is None or -from_right < least:
        return None
    inner = sizes[2]
    return partial(_aligned, from_right, size, lambda dim: Layout(dim, inner))


def _aligned(from_right: int, size: int, place: Callable[[int], Layout | Owners], copies: Tensor) -> Tensor:
    """(B, *shape) to the right place: the examples at ``from_right``."""
    at = copies.dim() - 1 + from_right  # in the parameter's own dimensions
    if at >= 0:
        if copies.shape[at + 1] != 1:
            raise _DoesNotFit
        placed = copies.squeeze(at + 1).movedim(0, at)
    else:
        placed, at = copies.view(len(copies), *[1] * (-at - 1), *copies.shape[1:]), 0
    spread = place(at).spread(placed, size)
    if spread is None:
        raise _DoesNotFit
    return spread


def routed(tracking: Tracking, func: Any, args: Any, kwargs: Mapping[str, Any], t: Tensor, owners: Owners) -> Any:
    """The operation on copies, where the rows of ``t`` have owners; NotImplemented where it does not fit."""
    align = partial(_aligned, owners.dim - t.dim(), t.shape[owners.dim], lambda dim: Owners(dim, owners.rows))
    return _with_copies(tracking, func, args, kwargs, align)


def _with_copies(
    tracking: Tracking, func: Any, args: Any, kwargs: Mapping[str, Any], align: Callable[[Tensor], Tensor]
) -> Any:
    def copied(t: Any) -> Any:
        source = tracking.known.get(id(t)) if isinstance(t, Tensor) else None
        return t if source is None else align(take(tracking, source))

    try:
        args, kwargs = tree_map(copied, (tuple(args), dict(kwargs)))
    except _DoesNotFit:
        return NotImplemented
    return func(*args, **kwargs)


def expanded(tracking: Tracking, func: Any, source: Source, args: Any, kwargs: Mapping[str, Any], site: Site) -> Tensor:
    """A parameter that is expanded, or repeated, to the size of the batch."""
    layout = site.out
    assert layout is not None
    shape = func(torch.empty_like(source.tensor, device="meta"), *args[1:], **kwargs).shape
    rows, own = tracking.current.rows, [1] * (len(shape) - source.tensor.dim()) + list(source.tensor.shape)
    copies = take(tracking, source).reshape(rows, *own)
    dim, size = layout.dim, shape[layout.dim]
    found: Tensor | None
    if own[dim] == 1:
        found = layout.spread(copies.squeeze(dim + 1).movedim(0, dim), size)
    else:
        found = copies.movedim(0, dim).flatten(dim, dim + 1) if size == rows * own[dim] else None
    if found is None:
        raise tracking.refusal(
            func, [source], f"its result of shape {tuple(shape)} does not fit the batch", "Use expand()"
        )
    repeats = [1 if n in (1, m) else m // n for n, m in zip(found.shape, shape, strict=True)]
    found = found.repeat(repeats) if any(r > 1 for r in repeats) else found
    found = found.expand(shape)
    copied = getattr(func, "__name__", "") in ("repeat", "tile")
    return found.clone(memory_format=torch.contiguous_format) if copied else found
