"""Notes what operations with parameters are given, in runs of the model from which its plan is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradveil.clipping.operations.mode import Operations
from gradveil.clipping.operations.plan import Base, Plan, Record, Site, copy_of
from gradveil.clipping.operations.routing import Routes, chooses_rows, finds_rows, is_packing
from gradveil.clipping.operations.sources import Source

if TYPE_CHECKING:
    pass


class Tracing(Operations):
    """Notes what operations with parameters were given, in a run of the model beside the user's own."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[int, Source],
        *,
        rows: int,
        differentiates: bool = True,
        changed: int | None = None,
    ) -> None:
        """``rows`` of the batch, and which of them was replaced by another."""
        super().__init__(plan, parameters)
        self._changed = changed
        self.records: dict[tuple[Base, int], Record] = {}
        self.needs_grad = differentiates
        self._without_grad = not differentiates
        self._selections, self._rows = Routes(plan, rows), rows
        self._found: dict[int, Any] = {}  # places that were found by what is in a tensor
        self.routes = self._selections if plan.routed else None

    def differentiates(self) -> bool:
        return self._without_grad or torch.is_grad_enabled()

    def is_followed(self, t: Tensor) -> bool:
        return t.requires_grad or (self._without_grad and t.is_floating_point())

    def look(self, func: Any, args: Any, kwargs: Any) -> Any:
        if chooses_rows(func, args, kwargs or {}) and isinstance(args[0], Tensor) and id(args[0]) not in self.known:
            self.records[self._selections.place(func, args[0])] = Record([copy_of(args[0])])
            by = [t for t in tree_leaves(args[1:]) if isinstance(t, Tensor)]
            found = any(id(t) in self._found or t.dtype is torch.bool for t in by)
            listed = func is Tensor.__getitem__ and isinstance(args[1], list)  # an order that Python has found
            self.plan.finds_rows |= found or listed or is_packing(func)
        result = super().look(func, args, kwargs)
        if finds_rows(func, args):
            self._found |= {id(t): t for t in tree_leaves(result)}
        return result

    def operate(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        tracked, others = self.parts(func, args, kwargs)
        if self.owners(others) is not None:
            self.plan.routed_slots.update(slot for source in tracked for slot in source.slots)
            return func(*args, **kwargs)
        place = self.place(func, tracked)
        record = self.records[place] = Record([copy_of(t) for t in others])
        result = func(*args, **kwargs)
        known = self.plan.get(*place)
        if known is not None and known.kind == "expansion":
            result = self._with_another_copy(result, known)
        if getattr(func, "__name__", "") == "__setitem__":
            record.results = [copy_of(args[0][args[1]])]
        else:
            record.results = [copy_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        site = self.plan.get(*place)
        record.derived = site.kind == "derived" if site is not None else self._looks_constant(others)
        if record.derived:
            self.register(func, args, result, place, tracked)
        return result

    def are_constant(self, others: Sequence[Tensor], place: tuple[Base, int]) -> bool:
        record = self.records[place] = Record([copy_of(t) for t in others])
        site = self.plan.get(*place)
        record.derived = site.kind == "derived" if site is not None else self._looks_constant(others)
        return record.derived

    def _looks_constant(self, others: Sequence[Tensor]) -> bool:
        """What is taken to be derived until it is known: it would take one more round of runs for each operation."""
        return all(n % self._rows for t in others for n in t.shape)

    def _with_another_copy(self, result: Any, site: Site) -> Any:
        """A parameter that is expanded to the batch: the copy of the replaced example is another one too, so that it is
        seen what becomes of it. (In the other runs the same is done with ones, so that they round alike.)
        """
        apart = site.out.front(result, self._rows) if isinstance(result, Tensor) and site.out is not None else None
        if apart is None or not result.is_floating_point():
            return result
        front, undo = apart
        scale = torch.ones(self._rows, dtype=result.dtype, device=result.device)
        if self._changed is not None:
            scale[self._changed] = 1.125
        return undo(front * scale.view(-1, *[1] * (front.dim() - 1)) + (scale - 1).view(-1, *[1] * (front.dim() - 1)))
