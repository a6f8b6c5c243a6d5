"""Whose rows the model is given, as far as its tensors show it.

The loader's tensors are known by their memory, and so are views of them: slices, reshapes, the same batch as it is.
Refused, when such a call of the model has gone through backward():

    rows of a batch, or of a part of one, that was handed out earlier   they would be charged as a fresh sample
    a row in two pieces of a batch that the user has cut up             it would contribute twice

A copy (on a GPU, say) and what preprocessing computes from a batch are not recognised; the statement says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from gradveil.clipping.backward_pass import BackwardPass
from gradveil.engine.batches import Batches
from gradveil.errors import PrivacyViolation

_MANY = 64  # tensors, of which those that are gone are forgotten


class _Memory(NamedTuple):
    """Of a tensor that the loader has handed out, with the examples first."""

    alive: StorageWeakRef  # while it is held, no other memory has the same address
    number: int  # of the batch, or part, that it was handed out in last
    step: int
    start: int  # offset of the first row
    stride: int  # from one row to the next


class _Call(NamedTuple):
    """Of the model, with rows that are known."""

    of: weakref.ref[BackwardPass]
    stale: _Memory | None  # of an earlier batch
    rows: set[int]  # of this one, where they are a piece of it

    @property
    def is_differentiated(self) -> bool:
        current = self.of()
        with suppress(RuntimeError):  # of a pass that is gone in C++
            return current is not None and current.started
        return False


class Drawn:
    """The tensors that the loader has handed out, and which rows of them went through the model."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._number = 0  # of the batch, or part, that was handed out last
        self._memory: dict[int, _Memory] = {}  # by address
        self._calls: list[_Call] = []  # since the batch was handed out; those that have not been differentiated
        self._taken: set[int] = set()  # rows of the pieces that went through backward()

    def hand_out(self, batch: Any) -> None:
        """The loader hands out ``batch``, for the ticket that :class:`Batches` has got."""
        ticket = self._batches.ticket
        assert ticket is not None
        self._number += 1
        self.give_up()
        if len(self._memory) > _MANY:
            self._memory = {place: memory for place, memory in self._memory.items() if not memory.alive.expired()}
        rows = {ticket.size, ticket.size * self._batches.views}
        for t in tensors_of(batch):
            storage = _storage(t) if t.dim() and t.shape[0] in rows and t.numel() else None
            if storage is not None:
                self._memory[storage._cdata] = _Memory(
                    StorageWeakRef(storage), self._number, ticket.step, int(t.storage_offset()), t.stride(0)
                )

    def called(self, current: BackwardPass, args: Any, kwargs: Any) -> None:
        """The model is called: note whose rows it gets, where that says something."""
        ticket = self._batches.ticket
        if not self._memory or ticket is None or not self._batches.is_open:
            return
        given = args[0] if len(args) == 1 and not kwargs else None
        tensors = [given] if isinstance(given, Tensor) else [t for t in tensors_of((args, kwargs)) if t.dim()]
        known = [self._memory_of(t) for t in tensors]
        stale = next((memory for memory in known if memory is not None and memory.number != self._number), None)
        rows = set[int]()
        if known and known[0] is not None and len(tensors[0]) < ticket.size * self._batches.views:
            rows = _rows(tensors[0], known[0])
        if stale is not None or rows:
            self._calls.append(_Call(weakref.ref(current), stale, rows))

    def backward_ended(self) -> None:
        """A backward pass has ended, and has left clipped sums."""
        if not self._calls:
            return
        ended = [call for call in self._calls if call.is_differentiated]
        self._calls = [call for call in self._calls if call not in ended]
        if len(ended) != 1:
            return  # none that is known; or also one for the gradient of an input, which cannot be told from it
        if ended[0].stale is not None:
            raise self._stale(ended[0].stale)
        if again := ended[0].rows & self._taken:
            raise PrivacyViolation(
                f"row {min(again)} of the batch went through backward() twice in this step: an example that "
                "contributes more than once is not bounded by its clip, and another one was left out. Cut the batch "
                "into pieces that do not overlap, such as x.split(32), or let the loader do it: physical_batch_size."
            )
        self._taken |= ended[0].rows

    def give_up(self) -> None:
        """What was summed up of the batch is gone: its pieces may come again."""
        self._calls = []
        self._taken.clear()

    def _memory_of(self, t: Tensor) -> _Memory | None:
        storage = _storage(t)
        return None if storage is None else self._memory.get(storage._cdata)

    def _stale(self, memory: _Memory) -> PrivacyViolation:
        ticket = self._batches.ticket
        assert ticket is not None
        return PrivacyViolation(
            f"the model was given rows of a batch, or of a part of one, that the loader had handed out earlier (for "
            f"step {memory.step}) in place of the one it has handed out last (for step {ticket.step}): the step would "
            "be charged as a fresh sample, and those examples would contribute more often than is accounted for. "
            "Nothing was released. Give the model the batch of the loop: `for x, y in loader: ... model(x)`."
        )


def tensors_of(batch: Any) -> list[Tensor]:
    """In tuples, lists and mappings of any class."""
    if type(batch) in (list, tuple) and all(type(t) is Tensor for t in batch):
        return list(batch)  # as mostly, at a fraction of the cost
    found: list[Tensor] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_of(list(leaf.values()))
    return found


def _storage(t: Tensor) -> torch.UntypedStorage | None:
    """None where a tensor is not a grid of numbers in memory."""
    if t.layout is not torch.strided or t.is_nested:
        return None
    try:
        return t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a subclass that holds other tensors
        return None


def _rows(t: Tensor, memory: _Memory) -> set[int]:
    """Which rows of a handed-out tensor a view of it holds; empty where that cannot be told."""
    if not memory.stride or not t.dim() or t.stride(0) <= 0 or t.stride(0) % memory.stride:
        return set()
    first, apart = (t.storage_offset() - memory.start) // memory.stride, t.stride(0) // memory.stride
    return set(range(first, first + apart * len(t), apart))
