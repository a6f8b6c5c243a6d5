"""Rows that an index has chosen: which example each of them belongs to.

An expert gets the tokens that were routed to it; a packed sequence has the steps of several examples one after the
other. How many such rows there are, and whose, follows from the data, so no plan can know it. But the selection itself
is seen: made of the examples' numbers instead of their data, it gives the owner of every row. From there owners follow
the rows through operations that keep them apart (activations, products, layers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gradveil.clipping.operations.plan import Base
from gradveil.clipping.operations.table import BROADCASTING, LAYERS, named

if TYPE_CHECKING:
    from gradveil.clipping.operations.plan import Plan

T = torch.Tensor
_HERE = str(Path(__file__).parents[1])


@dataclass(frozen=True, eq=False)
class Owners:
    """Of a tensor: row r along ``dim`` belongs to example ``rows[r]``."""

    dim: int
    rows: Tensor

    def front(self, t: Tensor, batch: int) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """As :meth:`Layout.front`: (B, most rows of one example, ...). Places that are too many hold some row, of which
        nothing is used.
        """
        if t.dim() <= self.dim or t.shape[self.dim] != len(self.rows):
            return None
        kept, dim = t.movedim(self.dim, 0), self.dim
        if not len(kept):
            return kept.new_zeros((batch, 1, *kept.shape[1:])), lambda out: out.flatten(0, 1)[:0].movedim(0, dim)
        order = torch.argsort(self.rows, stable=True)
        counts = torch.bincount(self.rows, minlength=batch)
        starts = (counts.cumsum(0) - counts)[self.rows[order]]
        within = torch.empty_like(order)
        within[order] = torch.arange(len(order), device=order.device) - starts
        most = int(counts.max())
        index = order.new_zeros(batch * most)
        places = self.rows * most + within
        index[places] = torch.arange(len(order), device=order.device)
        return kept[index].unflatten(0, (batch, most)), lambda out: out.flatten(0, 1)[places].movedim(0, dim)

    def spread(self, copies: Tensor, size: int) -> Tensor | None:
        """(pre, B, post) with the examples at ``dim``, as (pre, size, post): each row has its owner's copy."""
        return copies.index_select(self.dim, self.rows) if size == len(self.rows) else None


SELECTING: set[Any] = {
    T.__getitem__,
    *named("index_select masked_select gather take_along_dim sort", torch, T),
    *named("_pack_padded_sequence", torch),
}
_SPLITTING: set[Any] = named("split chunk tensor_split split_with_sizes", torch, T)
_REDUCING: set[Any] = named("sum mean amax amin max min logsumexp std var norm prod any all cumsum argmax", torch, T)
# What takes rows back to where they came from: the result is as its first argument was.
_RETURNING: set[Any] = named(
    "index_add index_add_ index_put index_put_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_ masked_scatter masked_scatter_ index_reduce __setitem__",
    torch,
    T,
)
_PACKING: set[Any] = named("_pack_padded_sequence", torch)
_UNPACKING: set[Any] = named("_pad_packed_sequence", torch)
# Each row of the result is made of the same row of what is given.
ROWWISE: set[Any] = (
    BROADCASTING
    | set(LAYERS)
    | named(
        "relu gelu silu sigmoid tanh softplus elu leaky_relu mish hardswish hardsigmoid softmax log_softmax dropout "
        "layer_norm rms_norm normalize glu selu celu relu6 logsigmoid hardtanh gumbel_softmax",
        F,
    )
    | named(
        "relu sigmoid tanh softmax log_softmax exp log log1p expm1 sqrt rsqrt square abs neg reciprocal sin cos erf "
        "clamp clamp_min clamp_max clip float double half bfloat16 to type clone contiguous detach chunk split "
        "tensor_split unbind unsqueeze squeeze view reshape flatten unflatten mul_ add_ sub_ div_ relu_ silu_ tanh_ "
        "sigmoid_ clamp_ masked_fill masked_fill_ transpose mT narrow dropout floor_divide __floordiv__ remainder "
        "__mod__ __neg__ eq ne lt gt le ge __eq__ __ne__ __lt__ __gt__ __le__ __ge__ bmm type_as long int",
        torch,
        T,
    )
    | {T.mT.__get__, torch.matmul, T.matmul, T.__matmul__}  # type: ignore[attr-defined]
)
_PRODUCTS: set[Any] = {torch.matmul, T.matmul, T.__matmul__}
_VIEWS: set[Any] = named(
    "transpose view reshape flatten unflatten unsqueeze squeeze chunk split narrow unbind", torch, T
)


class Routes:
    """The owners of the rows of tensors, in one run of the model."""

    def __init__(self, plan: Plan, rows: int) -> None:
        self._plan, self._batch = plan, rows
        self._of: Any = WeakIdKeyDictionary()
        self._lost: Any = WeakIdKeyDictionary()  # tensors with rows that are no longer known to be whose
        self._selected: dict[Base, dict[int, Tensor]] = {}

    def of(self, t: Any) -> Owners | None:
        found: Owners | None = self._of.get(t) if isinstance(t, Tensor) else None
        return found

    def is_lost(self, t: Tensor) -> bool:
        return t in self._lost

    def set(self, t: Tensor, owners: Owners) -> None:
        self._of[t] = owners

    def set_in_order(self, t: Tensor) -> None:
        if len(t) == self._batch:
            self._of[t] = Owners(0, torch.arange(self._batch, device=t.device))
            self._lost.pop(t, None)

    def place(self, func: Any, x: Tensor) -> tuple[Base, int]:
        """Of a selection: where in the model's code it stands, and of which tensor there. (An expert that gets no token
        may be left out, so calls cannot be counted.)
        """
        base: Base = (func, (_caller(sys._getframe(1)),))
        seen = self._selected.setdefault(base, {})
        nth = list(seen).index(id(x)) if id(x) in seen else len(seen)
        seen[id(x)] = x
        return base, nth

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Follow owners through an operation that has just been made."""
        out = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not out or self.of(out[0]) is not None:
            return
        if func in SELECTING and isinstance(args[0], Tensor) and self._is_selection(func, args, kwargs):
            self._select(func, args, kwargs, result)
        elif func in (torch.cat, torch.concat):
            self._cat(args, kwargs, out[0])
        elif func in _UNPACKING and (packed := self.of(args[0])) is not None:
            dim = 0 if args[2] else 1
            self._of[out[0]] = Owners(dim, packed.rows[: out[0].shape[dim]])
        elif func in ROWWISE or func in _REDUCING or func is T.__getitem__:
            self._follow(func, args, kwargs, out)
        self._lose(func, args, kwargs, out)

    def _lose(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Sequence[Tensor]) -> None:
        """Note results whose rows are no longer known to be whose: the plan does not know either."""
        rest = [t for t in out if t.dim() and t not in self._of]
        if not rest:
            return
        given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
        if func in _RETURNING:
            given = given[:1]
        elif func in SELECTING:
            given = given[:1]  # where rows are taken from; the index only says which
        if any(t in self._lost or ((o := self.of(t)) is not None and not self._in_order(o)) for t in given):
            for t in rest:
                self._lost[t] = True

    def _in_order(self, owners: Owners) -> bool:
        """Whether the rows are the examples', each with as many, in their order: as a plan has them."""
        rows = owners.rows
        if len(rows) % self._batch:
            return False
        own = torch.arange(self._batch, device=rows.device)
        return torch.equal(rows, own.repeat_interleave(len(rows) // self._batch))

    def _is_selection(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether rows are chosen: by a tensor, or of a tensor whose rows have owners."""
        return self.of(args[0]) is not None or chooses_rows(func, args, kwargs)

    def _select(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        x = args[0]
        owners = self.of(x) or (self._planned(func, x) if x not in self._lost else None)
        if owners is None:
            return
        shape = [1] * x.dim()
        shape[owners.dim] = -1
        numbers = owners.rows.to(x.device).view(shape).expand(x.shape)
        if getattr(func, "__name__", "") == "sort":
            dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
            chosen = numbers.gather(dim, result[1])
            self._set_all([result[0], result[1]], chosen)
            return
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            chosen, first = func(numbers.contiguous(), *args[1:], **kwargs)[0], result[0]
        else:
            chosen, first = func(numbers, *args[1:], **kwargs), result
        self._set_all([first], chosen)

    def _set_all(self, results: Sequence[Tensor], chosen: Tensor) -> None:
        owners = _along_one(chosen)
        for t in results if owners is not None else ():
            self._of[t] = owners

    def _planned(self, func: Any, x: Tensor) -> Owners | None:
        site = self._plan.get(*self.place(func, x))
        layout = site.layouts[0] if site is not None and site.kind == "meeting" else None
        sizes = layout.split(x.shape[layout.dim], self._batch) if layout is not None and x.dim() > layout.dim else None
        if layout is None or sizes is None:
            return None
        outer, batch, inner = sizes
        rows = torch.arange(batch, device=x.device).repeat_interleave(inner).repeat(outer)
        return Owners(layout.dim, rows)

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Sequence[Tensor]) -> None:
        given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
        owned = [(t, self._of[t]) for t in given if t in self._of]
        if not owned:
            return
        x, owners = owned[0]
        if any(not _same(owners, other) for _, other in owned[1:]):
            return
        if func in _PRODUCTS and (x is not args[0] or owners.dim >= x.dim() - 1):
            return  # summed over, or of another factor
        if func in _SPLITTING and sum(t.shape[owners.dim] for t in out) == len(owners.rows) and len(out) > 1:
            for t, rows in zip(out, owners.rows.split([t.shape[owners.dim] for t in out]), strict=True):
                self._of[t] = Owners(owners.dim, rows)
            return
        if func in _REDUCING and not _reduces_after(owners.dim, x.dim(), args, kwargs):
            return
        for t in out:
            aligned = t.dim() - x.dim() + owners.dim if func in BROADCASTING else owners.dim
            if t.dim() <= aligned or t.shape[aligned] != len(owners.rows):
                continue
            if (func in _VIEWS or func is T.__getitem__) and t.numel() and not _keeps_rows(x, t, owners.dim):
                continue
            self._of[t] = owners if aligned == owners.dim else Owners(aligned, owners.rows)

    def _cat(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        parts, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
        owners = [self.of(t) for t in parts]
        if not owners or any(o is None for o in owners):
            return
        known = [o for o in owners if o is not None]
        if len({o.dim for o in known}) != 1:
            return
        if dim % out.dim() == known[0].dim:
            self._of[out] = Owners(known[0].dim, torch.cat([o.rows for o in known]))
        elif all(_same(known[0], o) for o in known):
            self._of[out] = known[0]


def _reduces_after(dim: int, dims: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a reduction is over dimensions behind this one."""
    over = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    over = [over] if isinstance(over, int) else over
    return isinstance(over, list | tuple) and all(isinstance(d, int) and d % dims > dim for d in over)


def chooses_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation chooses from a tensor by another one."""
    if func not in SELECTING:
        return False
    if func is T.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any((isinstance(i, Tensor) and i.dim() > 0) or isinstance(i, list) for i in index)
    return True


_FINDING: set[Any] = named("nonzero argsort sort msort topk unique", torch, T)


def is_packing(func: Any) -> bool:
    return func in _PACKING


def finds_rows(func: Any, args: Sequence[Any]) -> bool:
    """Whether places are found by what is in a tensor, so that their number follows from it."""
    return func in _FINDING or (func is torch.where and len(args) == 1)


def is_number(func: Any, t: Tensor) -> bool:
    """Whether a tensor only says which part of a parameter is taken: W[expert]."""
    return func is T.__getitem__ and t.dim() == 0 and not t.is_floating_point() and t.dtype is not torch.bool


def _same(a: Owners, b: Owners) -> bool:
    return a is b or (a.dim == b.dim and torch.equal(a.rows, b.rows))


def _along_one(numbers: Tensor) -> Owners | None:
    """The dimension along which owners change, where it is one."""
    for dim in range(numbers.dim()):
        apart = numbers.movedim(dim, 0).flatten(1) if numbers.dim() > 1 else numbers.unsqueeze(1)
        if apart.shape[1] == 0 or bool((apart == apart[:, :1]).all()):
            rows = apart[:, 0] if apart.shape[1] else apart.new_zeros(len(apart))
            return Owners(dim, rows.contiguous())
    return None


def _keeps_rows(x: Tensor, t: Tensor, dim: int) -> bool:
    """Whether a view has the same rows at the same place, from what stands where in memory."""
    if t.shape[dim] != x.shape[dim]:
        return False
    if x.shape[dim] <= 1 or t.stride(dim) == x.stride(dim):
        return True
    before, after = x.shape[:dim], t.shape[:dim]
    return before == after and x.is_contiguous() and t.is_contiguous()


def _caller(frame: FrameType | None) -> tuple[str, int]:
    """The line of the model's code, or of torch's, that an operation stands in."""
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
